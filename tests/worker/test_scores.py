"""Scores against transformers' own classes and sentence-transformers' CrossEncoder: every head, pairs with types,
language models that answer, what folders say of all that, refusals."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore, Transformer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.text.pairs import pair_tokenizer
from common.text.tokenization import Tokenizer, TruncationRule
from tests import parity
from tests.models import edit_json, embed, make_batch, roberta_tokenizer, tokenizer, write_bert, write_json
from tests.parity import VOCAB_SIZE
from tests.worker.conftest import make_engine
from worker.batch.ragged import BadBatch
from worker.checkpoint import declared as checkpoint_module
from worker.checkpoint.architectures import ARCHITECTURES
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.engine.engine import Engine
from worker.process.inspection import Inspection

LIMIT = 40
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"

INPUTS = ["input_ids", "token_type_ids", "attention_mask"]

Scores = npt.NDArray[np.float32]

COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = COMMON | {"intermediate_size": 80, "max_position_embeddings": LIMIT}
ROBERTA = ENCODER | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1, "pad_token_id": 1}
DISTILBERT = {"vocab_size": VOCAB_SIZE, "dim": 32, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}
DECODER = ENCODER | {"num_key_value_heads": 2}
HEAD_DIM = DECODER | {"head_dim": 16}

# Class of transformers, without "ForSequenceClassification" → fields of its configuration.
FAMILIES: dict[str, dict[str, object]] = {
    "Bert": ENCODER,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "Camembert": ROBERTA,
    "DistilBert": DISTILBERT | {"max_position_embeddings": LIMIT},
    "MPNet": ENCODER | {"max_position_embeddings": LIMIT + 2, "pad_token_id": 1},
    "NomicBert": ENCODER | {"type_vocab_size": 2},
    "Gte": ENCODER | {"type_vocab_size": 2},
    "ModernBert": ENCODER | {"classifier_pooling": "mean"},
    "Gemma3Text": HEAD_DIM,
    "Qwen3": HEAD_DIM,
    "Qwen2": DECODER,
    "Mistral": DECODER,
    "Llama": DECODER,
}


def classifier(family: str, num_labels: int = 1, **changes: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForSequenceClassification")
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    fields = special | FAMILIES[family] | {"num_labels": num_labels} | changes
    return model(config(**fields))


def reference(model: PreTrainedModel, ids: list[list[int]], type_starts: list[int] | None = None) -> Scores:
    """transformers' logits of each sequence alone."""
    model.set_attn_implementation("eager")
    rows = []
    for index, row in enumerate(ids):
        inputs = {"input_ids": torch.tensor([row])}
        if type_starts is not None:
            inputs["token_type_ids"] = (torch.arange(len(row)) >= type_starts[index]).long()[None]
        with torch.no_grad():
            rows.append(model(**inputs).logits[0])
    return torch.stack(rows).numpy()


def check(engine: Engine, expected: Scores, ids: list[list[int]], type_starts: list[int] | None = None) -> None:
    """All at once, each alone, and in another order."""
    width = engine.hello().dimensions
    order = list(range(len(ids)))
    random.Random(3).shuffle(order)
    types = type_starts or []
    together = embed(engine, ids, width=width, type_starts=types)
    alone = [embed(engine, [row], width=width, type_starts=types[i : i + 1]) for i, row in enumerate(ids)]
    shuffled = np.empty_like(together)
    shuffled_types = [types[index] for index in order] if types else []
    shuffled[order] = embed(engine, [ids[index] for index in order], width=width, type_starts=shuffled_types)
    for scores in (together, np.concatenate(alone), shuffled):
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def sequences(limit: int = LIMIT) -> list[list[int]]:
    return parity.sequences(limit)


# --- the heads of classifiers ---


@pytest.mark.slow
@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize(
    "family",
    [
        row.name.removesuffix("ForSequenceClassification")
        for row in ARCHITECTURES.values()
        if row.score_head is not None and row.name != "NewForSequenceClassification"  # a test of its own
    ],
)
def test_scores_are_the_logits_of_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    model = parity.seeded(classifier(family, num_labels))
    engine = make_engine(parity.save(model, tmp_path))

    assert engine.hello().dimensions == engine.hello().num_labels == num_labels
    assert engine.hello().labels == ["LABEL_0", "LABEL_1"][:num_labels]
    check(engine, reference(model, sequences()), sequences())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"classifier_pooling": "cls"},
        {"classifier_bias": True},
        {"classifier_activation": "relu"},
        {"norm_bias": True},
        {"norm_eps": 0.3},
    ],
    ids=str,
)
def test_each_field_of_modernberts_head_counts(changes: dict[str, object], tmp_path: Path) -> None:
    model = parity.seeded(classifier("ModernBert", **changes))
    engine = make_engine(parity.save(model, tmp_path))

    check(engine, reference(model, sequences()), sequences())
    plain = parity.seeded(classifier("ModernBert"))
    assert np.abs(reference(plain, sequences()) - reference(model, sequences())).max() > 1e-3


@pytest.mark.parametrize("family", ["Bert", "NomicBert", "Gte"])
def test_the_second_text_of_a_pair_has_tokens_of_its_own_type(family: str, tmp_path: Path) -> None:
    model = parity.seeded(classifier(family))
    write_json(parity.save(model, tmp_path) / "tokenizer_config.json", {"model_input_names": INPUTS})
    engine = make_engine(tmp_path)
    ids = sequences()
    starts = [random.Random(len(row)).randrange(len(row) + 1) for row in ids]

    assert engine.hello().has_token_types
    check(engine, reference(model, ids, starts), ids, starts)
    assert np.abs(reference(model, ids, starts) - reference(model, ids)).max() > 1e-2


def test_a_model_with_one_type_takes_no_others(tmp_path: Path) -> None:
    engine = make_engine(parity.save(parity.seeded(classifier("XLMRoberta")), tmp_path))

    assert not engine.hello().has_token_types
    with pytest.raises(BadBatch, match="second type"):
        engine.step(make_batch([[5, 6, 7]], width=1, type_starts=[2]))


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_sequence_is_scored_at_its_last_token_that_is_not_padding(family: str, tmp_path: Path) -> None:
    model = parity.seeded(classifier(family, 2, pad_token_id=7))
    engine = make_engine(parity.save(model, tmp_path))
    ids = [[5, 9, 11, 7], [5, 9, 7, 7, 7], [7, 5], [7, 9, 7, 11], [7, 7, 7], [7], [9]]

    check(engine, reference(model, ids), ids)


def test_without_a_padding_token_the_last_one_counts(tmp_path: Path) -> None:
    model = parity.seeded(classifier("Qwen3", pad_token_id=None))
    engine = make_engine(parity.save(model, tmp_path))

    check(engine, reference(model, sequences()), sequences())


def test_a_head_computes_in_float32_whatever_the_body_does(tmp_path: Path) -> None:
    model = parity.seeded(classifier("Bert", 2))
    parity.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["classifier.weight"][0] = tensors["classifier.weight"][1] + 1e-4  # which bfloat16 would not tell apart
    tensors["classifier.bias"][:] = 0
    save_file(tensors, tmp_path / "model.safetensors")

    scores = embed(make_engine(tmp_path, dtype="bfloat16"), [[5, 9, 11]], width=2)

    assert scores[0, 0] != scores[0, 1]


def test_names_of_the_models_own_code_are_understood(tmp_path: Path) -> None:
    model = parity.seeded(classifier("Gte"))
    parity.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(r"^gte\.", "new.", name): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    code = {"AutoModelForSequenceClassification": "Alibaba-NLP/new-impl--modeling.NewForSequenceClassification"}
    changes = {"architectures": ["NewForSequenceClassification"], "model_type": "new", "auto_map": code}
    edit_json(tmp_path / "config.json", **changes)

    assert "new.pooler.dense.weight" in renamed
    check(make_engine(tmp_path), reference(model, sequences()), sequences())


def test_a_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    parity.save(classifier("Bert"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.pooler.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"Missing tensors: pooler.dense.weight"):
        make_engine(tmp_path)


# --- what a folder says of its scores ---


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier without anything of sentence-transformers. Not to be changed: `copy` it."""
    return parity.save(parity.seeded(classifier("Bert")), tmp_path_factory.mktemp("scores") / "bert")


@pytest.fixture
def copy(cross_encoder: Path, tmp_path: Path) -> Path:
    for file in cross_encoder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_facts_are_those_of_a_scorer(cross_encoder: Path) -> None:
    facts = make_engine(cross_encoder).hello()

    assert (facts.tasks, facts.num_labels, facts.dimensions) == (["score"], 1, 1)
    assert (facts.score_activation, facts.pair_template, facts.instruction) == ("sigmoid", "pair", None)
    assert (facts.pooling, facts.normalize, facts.encodings) == ("cls", False, ["float32"])
    assert (facts.prompts, facts.default_prompt_name) == ({}, None)


def test_the_facts_of_an_embedding_model_say_nothing_of_scores(tiny_engine: Engine) -> None:
    facts = tiny_engine.hello()

    assert facts.tasks == ["embed", "tokens"]
    assert (facts.num_labels, facts.score_activation, facts.pair_template) == (0, "", "")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({"id2label": {"0": "a"}, "num_labels": 1}, 1),
        ({"id2label": None, "num_labels": 1}, 1),
        ({"id2label": None}, 2),
        ({"id2label": None, "label2id": {"a": 0}}, 2),
    ],
)
def test_the_number_of_labels_is_read_as_transformers_does(
    copy: Path, fields: dict[str, object], expected: int
) -> None:
    edit_json(copy / "config.json", **fields)

    checkpoint = Checkpoint.read(copy)

    assert checkpoint.scoring is not None
    assert checkpoint.scoring.num_labels == checkpoint.dimensions == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id2label": {"1": "b", "0": "a", "2": 7}}, ("a", "b", "7")),
        ({"id2label": None, "num_labels": 1}, ("LABEL_0",)),
        ({"id2label": None}, ("LABEL_0", "LABEL_1")),
    ],
)
def test_labels_are_told_by_their_names(copy: Path, fields: dict[str, object], expected: tuple[str, ...]) -> None:
    edit_json(copy / "config.json", **fields)

    checkpoint = Checkpoint.read(copy)

    assert checkpoint.scoring is not None
    assert checkpoint.scoring.labels == expected


@pytest.mark.parametrize(
    ("fields", "num_labels", "expected"),
    [
        ({}, 1, "sigmoid"),
        ({}, 2, "identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1"}},
            1,
            "identity",
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 2, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": None}}, 1, "sigmoid"),
        ({"sentence_transformers": {"version": "4.1"}}, 1, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, 2, "sigmoid"),
        (
            {
                "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"},
                "sbert_ce_default_activation_function": "torch.nn.Identity",
            },
            1,
            "sigmoid",
        ),
    ],
)
def test_the_activation_is_read_as_sentence_transformers_does(
    copy: Path, fields: dict[str, object], num_labels: int, expected: str
) -> None:
    edit_json(copy / "config.json", id2label={str(label): "" for label in range(num_labels)}, **fields)

    checkpoint = Checkpoint.read(copy)

    assert checkpoint.scoring is not None
    assert checkpoint.scoring.activation == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {}}, "id2label"),
        ({"id2label": ["a"]}, "id2label"),
        ({"id2label": None, "num_labels": 0}, "num_labels"),
        ({"num_labels": 2}, "num_labels: 2, but id2label has 1"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label: a name for each"),
        ({"id2label": {"0": "a", "1": None}}, "id2label: a name for each"),
        (
            {"id2label": {str(label): "é" * 300 for label in range(60)}},
            "id2label: the names have more than 32768 bytes",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh' is not supported"),
        ({"sentence_transformers": {"activation_fn": "mine.Sigmoid"}}, "mine.Sigmoid"),
        ({"sentence_transformers": {"activation_fn": ["torch.nn.Sigmoid"]}}, "sentence_transformers.activation_fn"),
        ({"sentence_transformers": {"scale": 2}}, "scale"),
        ({"sentence_transformers": "Sigmoid"}, "sentence_transformers"),
        ({"architectures": ["ElectraForSequenceClassification"]}, "ElectraForSequenceClassification"),
    ],
)
def test_what_is_not_understood_of_scores_is_refused(copy: Path, fields: dict[str, object], message: str) -> None:
    edit_json(copy / "config.json", **fields)

    with pytest.raises(ModelError, match=message) as refused:
        make_engine(copy)

    assert "config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"), [("classifier_pooling", "max"), ("classifier_pooling", None), ("classifier_activation", "x")]
)
def test_a_head_of_modernbert_that_is_not_known_is_refused(tmp_path: Path, field: str, value: object) -> None:
    parity.save(classifier("ModernBert"), tmp_path, **{field: value})

    with pytest.raises(ModelError, match=field):
        make_engine(tmp_path)


def test_the_operators_task_has_to_be_the_models(copy: Path, tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"--task embed: .*BertForSequenceClassification that is for --task score"):
        make_engine(copy, task="embed")
    with pytest.raises(ModelError, match=r"--task score: .*BertModel that is for --task embed"):
        make_engine(tiny_folder, task="score")

    assert make_engine(copy, task="score").hello().tasks == ["score"]
    assert make_engine(tiny_folder, task="embed").hello().tasks == ["embed", "tokens"]


def test_the_task_is_known_before_torch_is_needed(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["checkpoint", str(copy), "embed"])

    assert checkpoint_module.main() == 78
    assert "--task embed" in capsys.readouterr().err


def test_a_classifier_among_modules_that_pool_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["BertForSequenceClassification"], id2label={"0": "a"})

    with pytest.raises(ModelError, match="type: a BertForSequenceClassification scores by its own head"):
        make_engine(tmp_path)


def test_a_transformer_alone_that_is_no_classifier_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)
    write_json(tmp_path / "modules.json", [json.loads((tmp_path / "modules.json").read_text())[0]])

    with pytest.raises(ModelError, match="a Transformer, a Pooling"):
        make_engine(tmp_path)


# --- sentence-transformers' CrossEncoder ---

QUERIES = ["w3 w9 w14", "w50", "w7 w7 w8 w61 w2 w33"]
DOCUMENTS = [
    "w3 w9 w14",
    "w4 w9 w14 w20",
    "w60 w61 w62 w63 w64 w65 w66",
    "w1",
    "w14 w9 w3",
    " ".join(f"w{3 + 7 * i % 53}" for i in range(LIMIT + 20)),
    "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29 w30",
    "w9 w9 w9",
    "w50 w51",
    "w7 w8 w61",
]


def pair_words() -> RustTokenizer:
    words = tokenizer(VOCAB_SIZE - 3)
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return words


def answering_words() -> RustTokenizer:
    """Without special tokens around a text; yes and no are words, and Qwen3-Reranker's template has its tokens."""
    marks = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    words = ["[UNK]", "[CLS]", "[SEP]", "yes", "no", *(f"w{i}" for i in range(VOCAB_SIZE - 9)), *marks]
    made = RustTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(marks)
    return made


def save_library(model: PreTrainedModel, words: RustTokenizer, folder: Path, inputs: list[str] = INPUTS) -> Path:
    """A model and a tokenizer that transformers itself loads; `inputs` are what the latter gives to the former."""
    parity.seeded(model).save_pretrained(folder)
    if getattr(model.config, "type_vocab_size", 0) < 2:
        inputs = [name for name in inputs if name != "token_type_ids"]
    padding = "<pad>" if words.token_to_id("<pad>") is not None else "[UNK]"
    options = {"model_max_length": LIMIT, "model_input_names": inputs, "pad_token": padding}
    made = FastTokenizer(tokenizer_object=words, **options)
    made.save_pretrained(folder)
    return folder


def our_scores(engine: Engine) -> Scores:
    """Of all pairs, as a gateway asks for them, the activation applied; [pairs, labels]."""
    facts = engine.hello()
    encoder = pair_tokenizer(facts, Tokenizer(facts))
    pairs = [pair for query in QUERIES for pair in encoder.encode(query, DOCUMENTS, TruncationRule(allowed=True))]
    starts = [pair.type_start for pair in pairs] if facts.has_token_types else []
    logits = embed(engine, [pair.ids.tolist() for pair in pairs], width=facts.num_labels, type_starts=starts)
    return 1 / (1 + np.exp(-logits)) if facts.score_activation == "sigmoid" else logits


def library_scores(folder: Path) -> Scores:
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    scores: Scores = CrossEncoder(str(folder), device="cpu").predict(pairs, batch_size=7)
    return scores.reshape(len(pairs), -1)


def resave(folder: Path, target: Path) -> Path:
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(target), create_model_card=False)
    return target


def check_order(ours: Scores, library: Scores) -> None:
    np.testing.assert_allclose(ours, library, rtol=0, atol=1e-5)
    for label in range(library.shape[1]):
        assert np.argsort(ours[:, label]).tolist() == np.argsort(library[:, label]).tolist()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "DistilBert", "ModernBert", "Qwen3"])
def test_pairs_of_texts_score_as_with_sentence_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    words = pair_words()
    if family == "XLMRoberta":
        words = roberta_tokenizer()
        words.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    folder = save_library(classifier(family, num_labels), words, tmp_path / "bare")
    saved = resave(folder, tmp_path / "saved")

    library = library_scores(folder)

    assert np.ptp(library) > 0.05
    check_order(our_scores(make_engine(folder)), library)
    check_order(our_scores(make_engine(saved)), library_scores(saved))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer_class", "inputs"),
    [
        ("BertTokenizer", None),
        ("BertTokenizerFast", None),
        ("BertTokenizer", ["input_ids", "attention_mask"]),
        ("TokenizersBackend", None),
        ("TokenizersBackend", INPUTS),
        ("RobertaTokenizer", None),
        (None, None),
    ],
)
def test_token_types_are_used_where_the_tokenizer_gives_them(
    tokenizer_class: str | None, inputs: list[str] | None, tmp_path: Path
) -> None:
    folder = save_library(classifier("Bert"), pair_words(), tmp_path)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    given = {"tokenizer_class": tokenizer_class, "model_input_names": inputs}
    names = {name: value for name, value in (tokenizer_config | given).items() if value is not None}
    write_json(folder / "tokenizer_config.json", names)

    library = AutoTokenizer.from_pretrained(folder)

    assert make_engine(folder).hello().has_token_types == ("token_type_ids" in library.model_input_names)


def test_a_tokenizer_whose_types_depend_on_a_release_is_refused(copy: Path) -> None:
    write_json(copy / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})

    with pytest.raises(ModelError, match=r"tokenizer_config.json: model_input_names: missing"):
        make_engine(copy)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Qwen3"])
@pytest.mark.parametrize("num_labels", [1, 2])
def test_on_a_gpu_scores_are_part_of_a_steps_graph(family: str, num_labels: int, tmp_path: Path) -> None:
    model = parity.seeded(classifier(family, num_labels))
    parity.save(model, tmp_path)
    starts = [len(row) // 2 for row in sequences()] if family == "Bert" else []
    expected = embed(make_engine(tmp_path), sequences(), width=num_labels, type_starts=starts)

    engine = make_engine(tmp_path, device="cuda", cache_dir=str(tmp_path / "cache"))

    for _ in range(3):  # eager, captured or eager again, replayed
        scores = embed(engine, sequences(), width=num_labels, type_starts=starts)
        engine.idle_work()
        np.testing.assert_allclose(scores, expected, rtol=0, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [torch.nn.Sigmoid(), torch.nn.Identity()], ids=["sigmoid", "identity"])
def test_a_saved_activation_wins_over_that_of_config_json(activation: torch.nn.Module, tmp_path: Path) -> None:
    folder = save_library(classifier("Bert"), pair_words(), tmp_path / "bare")
    model = CrossEncoder(str(folder), device="cpu", activation_fn=activation)
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    edit_json(tmp_path / "saved" / "config.json", sbert_ce_default_activation_function="torch.nn.Tanh")

    check_order(our_scores(make_engine(tmp_path / "saved")), library_scores(tmp_path / "saved"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CrossEncoder as sentence-transformers saves it."""
    folder = tmp_path_factory.mktemp("saved")
    return resave(save_library(classifier("Bert"), pair_words(), folder / "bare"), folder / "saved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (SETTINGS, {"model_type": "SentenceTransformer"}, "model_type"),
        (SETTINGS, {"activation_fn": "mine.Sigmoid"}, "mine.Sigmoid"),
        (SETTINGS, {"prompts": {"query": "q: "}, "default_prompt_name": "query"}, "default_prompt_name"),
        (SETTINGS, {"scale": 2}, "scale"),
        (TRANSFORMER, {"transformer_task": "feature-extraction"}, "transformer_task"),
        (TRANSFORMER, {"transformer_task": None}, "transformer_task"),
        (TRANSFORMER, {"module_output_name": "token_embeddings"}, "module_output_name"),
        (TRANSFORMER, {"modality_config": {"image": {"method": "forward"}}}, "modality_config"),
        (
            TRANSFORMER,
            {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}, "message": {}}},
            "template",
        ),
    ],
)
def test_what_a_saved_cross_encoder_must_not_say_is_refused(
    saved: Path, tmp_path: Path, file: str, fields: dict[str, object], message: str
) -> None:
    for source in saved.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    edit_json(tmp_path / file, **fields)

    with pytest.raises(ModelError, match=message):
        Checkpoint.read(tmp_path)


# --- language models that answer ---


def language_model(family: str = "Qwen3", **changes: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    fields = special | FAMILIES.get(family, HEAD_DIM) | changes
    return getattr(transformers, f"{family}ForCausalLM")(config(**fields))


def save_reranker(model: PreTrainedModel, folder: Path) -> Path:
    parity.save(parity.seeded(model), folder)
    answering_words().save(str(folder / "tokenizer.json"))
    return folder


def save_gemma_reranker(model: PreTrainedModel, folder: Path) -> Path:
    """Beside Gemma's own answer the words of the other template: they are other tokens."""
    parity.save(parity.seeded(model), folder)
    words = ["[UNK]", "<bos>", "yes", "no", "Yes", "No", "A", "B", ":", *(f"w{i}" for i in range(VOCAB_SIZE - 9))]
    made = RustTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<bos>"])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made.save(str(folder / "tokenizer.json"))
    return folder


def logit_of(model: PreTrainedModel, ids: list[list[int]], token: int) -> Scores:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1, [token]] for row in ids]).numpy()


def yes_less_no(model: PreTrainedModel, ids: list[list[int]], yes: int = 3, no: int = 4) -> Scores:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row])).logits[0, -1] for row in ids]
    return torch.stack([row[[yes]] - row[[no]] for row in logits]).numpy()


@pytest.mark.parametrize("tied", [True, False])
def test_a_qwen3_reranker_scores_by_yes_and_no(tied: bool, tmp_path: Path) -> None:
    model = language_model(tie_word_embeddings=tied)
    engine = make_engine(save_reranker(model, tmp_path), task="score")
    facts = engine.hello()

    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert (facts.tasks, facts.num_labels, facts.dimensions) == (["score"], 1, 1)
    assert (facts.pair_template, facts.score_activation, facts.pooling) == ("qwen3-reranker", "sigmoid", "last")
    check(engine, yes_less_no(model, sequences()), sequences())


@pytest.mark.parametrize("tied", [True, False])
def test_a_gemma_reranker_scores_by_yes_alone(tied: bool, tmp_path: Path) -> None:
    model = language_model("Gemma", tie_word_embeddings=tied)
    engine = make_engine(save_gemma_reranker(model, tmp_path), task="score")
    facts = engine.hello()

    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert (facts.tasks, facts.num_labels, facts.dimensions) == (["score"], 1, 1)
    assert (facts.pair_template, facts.instruction) == ("bge-reranker-v2-gemma", None)
    assert (facts.score_activation, facts.pooling) == ("sigmoid", "last")
    check(engine, logit_of(model, sequences(), 4), sequences())


def test_a_gemmas_head_is_tied_where_its_file_does_not_say(tmp_path: Path) -> None:
    model = language_model("Gemma", tie_word_embeddings=True)
    edit_json(save_gemma_reranker(model, tmp_path) / "config.json", tie_word_embeddings=None)

    check(make_engine(tmp_path, task="score"), logit_of(model, sequences(), 4), sequences())


def test_pairs_of_texts_score_by_gemmas_template(tmp_path: Path) -> None:
    model = language_model("Gemma", max_position_embeddings=80)
    engine = make_engine(save_gemma_reranker(model, tmp_path), task="score")
    prompt = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing "
        "a prediction of either 'Yes' or 'No'."
    )
    facts = engine.hello()
    documents = ["w3 w9 w14", "w60 w61", "<bos>"]
    pairs = pair_tokenizer(facts, Tokenizer(facts)).encode("w50 w2", documents, TruncationRule(allowed=False))
    words = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = [words.encode(f"A: w50 w2 B: {document} {prompt}").ids for document in documents[:2]]

    scores = embed(engine, [pair.ids.tolist() for pair in pairs], width=1)

    assert [pair.ids.tolist() for pair in pairs[:2]] == plain
    assert pairs[2].ids.tolist().count(1) == 1
    np.testing.assert_allclose(scores[:2], logit_of(model, plain, 4), rtol=0, atol=1e-5)


def test_a_gemma_scores_only_if_somebody_says_so_and_by_no_other_models_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_gemma_reranker(language_model("Gemma"), tmp_path)

    with caplog.at_level("INFO"):
        assert make_engine(folder).hello().tasks == ["embed", "tokens"]
    assert "if it is a bge-reranker-v2-gemma, --task score serves it as one" in caplog.text

    answering_words().save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="no token 'Yes', by which a bge-reranker-v2-gemma answers"):
        make_engine(folder, task="score")


def test_a_stored_head_counts_though_config_json_says_that_it_is_tied(tmp_path: Path) -> None:
    model = language_model(tie_word_embeddings=False)
    save_reranker(model, tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    library = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)

    engine = make_engine(tmp_path, task="score")

    check(engine, yes_less_no(library.eval(), sequences()), sequences())


def test_a_head_that_is_neither_stored_nor_tied_is_refused(tmp_path: Path) -> None:
    save_reranker(language_model(tie_word_embeddings=True), tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)

    with pytest.raises(ModelError, match=r"lm_head.weight is missing"):
        make_engine(tmp_path, task="score")


@pytest.mark.parametrize("tied", [True, False])
def test_an_inspection_finds_the_head_of_a_language_model_or_misses_it(tied: bool, tmp_path: Path) -> None:
    save_reranker(language_model(tie_word_embeddings=True), tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=tied)

    problems = Inspection.of("tiny", tmp_path, "score").problems

    missing = f"{tmp_path}/model.safetensors: lm_head.weight is missing, and not tied to the embeddings (none)."
    assert problems == ([] if tied else [missing])


def test_an_inspection_finds_a_head_of_another_shape(tmp_path: Path) -> None:
    save_reranker(language_model(tie_word_embeddings=False), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(5, 4)}, tmp_path / "model.safetensors")

    problems = Inspection.of("tiny", tmp_path, "score").problems

    assert len(problems) == 1
    assert "tensor lm_head.weight: a table of" in problems[0]


def test_a_row_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    save_reranker(language_model(tie_word_embeddings=False), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][4, 2] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"lm_head.weight: holds a NaN"):
        make_engine(tmp_path, task="score")


def test_a_language_model_scores_only_if_somebody_says_so(tmp_path: Path) -> None:
    folder = save_reranker(language_model(), tmp_path)

    assert make_engine(folder).hello().tasks == ["embed", "tokens"]
    assert make_engine(folder, task="embed").hello().tasks == ["embed", "tokens"]


def test_other_answers_are_another_model(tmp_path: Path) -> None:
    folder = save_reranker(language_model(), tmp_path)
    fingerprints = [make_engine(folder, task=task).hello().fingerprint for task in ("score", "embed")]

    assert len(set(fingerprints)) == 2


@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Mistral"])
def test_of_other_language_models_no_template_is_known(family: str, tmp_path: Path) -> None:
    folder = save_reranker(language_model(family), tmp_path)

    known = r"Qwen3-Reranker \(Qwen3ForCausalLM\) and bge-reranker-v2-gemma \(GemmaForCausalLM\) are known"
    with pytest.raises(ModelError, match=f"of language models only {known}"):
        make_engine(folder, task="score")


def test_a_vocabulary_without_the_answers_is_refused(tmp_path: Path) -> None:
    folder = parity.save(language_model(), tmp_path)

    with pytest.raises(ModelError, match="no token 'yes'"):
        make_engine(folder, task="score")


@pytest.mark.slow
@pytest.mark.parametrize(("yes", "no"), [(3, 4), (0, 95), (7, None)])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text", "Llama"])
def test_a_logit_score_is_that_of_sentence_transformers(family: str, yes: int, no: int | None, tmp_path: Path) -> None:
    if family == "Gemma3Text":
        fields = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None} | FAMILIES[family]
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**fields))
    else:
        model = language_model(family)
    folder = save_library(model, answering_words(), tmp_path / "bare")
    library = CrossEncoder(
        modules=[Transformer(str(folder), transformer_task="text-generation"), LogitScore(yes, no)], device="cpu"
    )
    library.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    engine = make_engine(tmp_path / "saved")

    assert (engine.hello().pair_template, engine.hello().num_labels) == ("pair", 1)
    check_order(our_scores(engine), library_scores(tmp_path / "saved"))


@pytest.fixture
def generative(tmp_path: Path) -> Path:
    """A CrossEncoder of a language model as sentence-transformers saves it, its pairs put into a chat template."""
    folder = save_reranker(language_model(), tmp_path)
    library = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    entries = [("", "sentence_transformers.base.modules.transformer.Transformer"), ("1_LogitScore", library)]
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(entries)],
    )
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": 3, "false_token_id": 4})
    write_json(folder / SETTINGS, {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"})
    forward = {"method": "forward", "method_output_name": "logits"}
    write_json(
        folder / TRANSFORMER,
        {
            "transformer_task": "text-generation",
            "modality_config": {"text": forward, "message": {**forward, "format": "flat"}},
            "module_output_name": "causal_logits",
        },
    )
    return folder


def test_a_chat_template_is_not_run_but_the_operator_can_say_whose_model_it_is(generative: Path) -> None:
    with pytest.raises(ModelError, match=r"modality_config: .*chat template.*--task score"):
        make_engine(generative)

    facts = make_engine(generative, task="score").hello()

    assert (facts.pair_template, facts.score_activation, facts.instruction) == ("qwen3-reranker", "identity", None)


def test_options_of_the_chat_template_go_with_it(generative: Path) -> None:
    edit_json(generative / TRANSFORMER, processing_kwargs={"chat_template": {"add_generation_prompt": True}})

    assert make_engine(generative, task="score").hello().pair_template == "qwen3-reranker"

    edit_json(generative / TRANSFORMER, processing_kwargs={"text": {"max_length": 3}})

    with pytest.raises(ModelError, match="processing_kwargs"):
        make_engine(generative, task="score")


def test_a_default_prompt_is_the_instruction(generative: Path) -> None:
    edit_json(generative / SETTINGS, prompts={"web": "Find passages"}, default_prompt_name="web")

    assert make_engine(generative, task="score").hello().instruction == "Find passages"

    edit_json(generative / SETTINGS, prompts={"web": ""})

    assert make_engine(generative, task="score").hello().instruction is None


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("1_LogitScore/config.json", {"true_token_id": 5}, "5, 4, but a Qwen3-Reranker answers by 'yes', 'no'"),
        ("1_LogitScore/config.json", {"false_token_id": None}, "false_token_id"),
        ("1_LogitScore/config.json", {"true_token_id": None}, "true_token_id"),
        ("1_LogitScore/config.json", {"true_token_id": VOCAB_SIZE}, "below vocab_size"),
        ("1_LogitScore/config.json", {"true_token_id": True}, "below vocab_size"),
        ("1_LogitScore/config.json", {"module_input_name": "scores"}, "module_input_name"),
        ("1_LogitScore/config.json", {"temperature": 2}, "temperature"),
        (SETTINGS, {"default_prompt_name": "web"}, "none of the prompts"),
        ("config.json", {"architectures": ["Qwen3Model"]}, "a Transformer, a Pooling"),
    ],
)
def test_a_reranker_that_answers_otherwise_is_refused(
    generative: Path, file: str, fields: dict[str, object], message: str
) -> None:
    edit_json(generative / file, **fields)

    with pytest.raises(ModelError, match=message):
        make_engine(generative, task="score")
