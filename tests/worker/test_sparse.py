"""Sparse rows against sentence-transformers' SparseEncoder on the same folder: heads, poolings, names, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.text.tokenization import Tokenizer, TruncationRule
from common.wire.rows import SPARSE, read_sparse, sparse_bytes
from tests import parity
from tests.models import edit_json, make_batch, roberta_tokenizer, tokenizer, write_json
from tests.parity import VOCAB_SIZE
from tests.worker.conftest import make_engine
from worker.attention.reference import ReferenceAttention
from worker.batch.lazy import Rows
from worker.batch.ragged import BadBatch, load_sorted
from worker.checkpoint.architectures import ARCHITECTURES
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.engine.engine import Engine
from worker.models import sparse

LIMIT = 40
POOLING = "1_SpladePooling/config.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
WEIGHTS = "model.safetensors"

# One word, a few, capitals (which are no words here), more than there are positions, the few in another order.
TEXTS = ["w3", "w5 w9 w5 w55 w9", "W5 w9", " ".join(f"w{3 + 7 * i % 53}" for i in range(LIMIT + 20)), "w9 w5 w5 w55 w9"]
TEXTS += [" ".join(f"w{5 * i % 57}" for i in range(length)) for length in (5, 6, 7, 29, 30, 31)]

COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = COMMON | {"intermediate_size": 80, "max_position_embeddings": LIMIT}
ROBERTA = ENCODER | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1, "pad_token_id": 1}

# Class of transformers, without "ForMaskedLM" → fields of its configuration.
FAMILIES: dict[str, dict[str, object]] = {
    "Bert": ENCODER,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "Camembert": ROBERTA,
    "DistilBert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 32,
        "hidden_dim": 80,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": LIMIT,
    },
    "MPNet": ENCODER | {"max_position_embeddings": LIMIT + 2, "pad_token_id": 1},
}

Dense = npt.NDArray[np.float32]  # [rows, vocabulary]


def masked(family: str = "Bert", **changes: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForMaskedLM")
    return parity.seeded(model(config(**(FAMILIES[family] | changes))))


def save_bare(model: PreTrainedModel, folder: Path) -> Path:
    """A masked language model and its tokenizer, without modules.json."""
    model.save_pretrained(folder)
    is_roberta = model.config.pad_token_id == 1
    words = roberta_tokenizer() if is_roberta else tokenizer(VOCAB_SIZE - 3)
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[UNK]"}
    if is_roberta:
        special = {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    FastTokenizer(tokenizer_object=words, model_max_length=LIMIT, **special).save_pretrained(folder)
    return folder


def save(bare: Path, folder: Path, pooling: SpladePooling | None = None, **options: object) -> Path:
    """What sentence-transformers writes of a SPLADE of this language model."""
    modules = [Transformer(str(bare), transformer_task="fill-mask"), pooling or SpladePooling()]
    SparseEncoder(modules=modules, device="cpu", **options).save(str(folder), create_model_card=False)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bare(masked(), tmp_path_factory.mktemp("bare"))


@pytest.fixture
def folder(bare: Path, tmp_path: Path) -> Path:
    return save(bare, tmp_path / "splade")


def reference(folder: Path, texts: list[str] = TEXTS, **options: object) -> Dense:
    model = SparseEncoder(str(folder), device="cpu")
    rows: Dense = model.encode(texts, batch_size=3, convert_to_sparse_tensor=False, **options).numpy()
    return rows


def ids_of(engine: Engine, texts: list[str] = TEXTS, prompt: str = "") -> list[list[int]]:
    encoded = Tokenizer(engine.hello()).encode([prompt + text for text in texts], TruncationRule(allowed=True))
    return [row.tolist() for row in encoded]


def step(engine: Engine, ids: list[list[int]], **options: object) -> Rows:
    width = engine.hello().dimensions
    return engine.step(make_batch(ids, width=width, encodings=[SPARSE] * len(ids), **options)).numpy()  # type: ignore[arg-type]


def dense(rows: Rows, width: int) -> Dense:
    """What sparse rows say, after a check of how they say it."""
    assert sparse_bytes(rows.rows) == rows.rows.shape[1]
    made = np.zeros((len(rows.rows), width), dtype=np.float32)
    for row, packed in zip(made, rows.rows, strict=True):
        columns, values = read_sparse(packed)
        assert (np.diff(columns) > 0).all()
        assert (values > 0).all()
        row[columns] = values
    return made


def rows_of(engine: Engine, ids: list[list[int]], **options: object) -> Dense:
    rows = step(engine, ids, **options)
    assert rows.finite.all()
    return dense(rows, engine.hello().dimensions)


def check(engine: Engine, expected: Dense, prompt: str = "") -> None:
    """All at once, and each alone."""
    ids = ids_of(engine, prompt=prompt)
    alone = np.concatenate([rows_of(engine, [row]) for row in ids])
    for rows in (rows_of(engine, ids), alone):
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)


# --- rows ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        row.name.removesuffix("ForMaskedLM")
        for row in ARCHITECTURES.values()
        if row.vocabulary_head is not None and row.kind == "masked_lm"
    ],
)
def test_rows_are_those_of_a_sparse_encoder(family: str, tmp_path: Path) -> None:
    folder = save(save_bare(masked(family), tmp_path / "bare"), tmp_path / "splade")
    engine = make_engine(folder)
    expected = reference(folder)

    assert 0.1 < (expected > 0).mean() < 0.95
    check(engine, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_each_pooling_is_that_of_sentence_transformers(
    bare: Path, strategy: str, activation: str, tmp_path: Path
) -> None:
    folder = save(bare, tmp_path, SpladePooling(strategy, activation_function=activation))
    engine = make_engine(folder)

    assert engine.hello().pooling == f"splade_{strategy}"
    check(engine, reference(folder))


def test_facts_say_that_rows_are_sparse(folder: Path) -> None:
    facts = make_engine(folder).hello()

    assert (facts.tasks, facts.encodings, facts.normalize) == (["sparse"], ["sparse"], False)
    assert facts.dimensions == facts.vocab_size == VOCAB_SIZE
    assert facts.max_tokens == LIMIT


@pytest.mark.slow
def test_a_bare_language_model_is_one_where_the_operator_says_so(bare: Path) -> None:
    engine = make_engine(bare, task="sparse")

    check(engine, reference(bare))
    assert make_engine(bare).hello().tasks == ["embed", "tokens"]


@pytest.mark.slow
def test_the_prompt_of_a_text_counts_like_the_text(bare: Path, tmp_path: Path) -> None:
    prompt = "w50 w51 "
    folder = save(bare, tmp_path, prompts={"query": prompt, "document": ""})
    engine = make_engine(folder)

    assert engine.hello().prompts == {"query": prompt, "document": ""}
    check(engine, reference(folder, prompt_name="query"), prompt)
    assert np.abs(reference(folder, prompt_name="query") - reference(folder)).max() > 1e-3


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_rows_do_not_depend_on_how_many_columns_are_made_at_once(
    bare: Path, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(save(bare, tmp_path, SpladePooling(strategy)))
    ids = parity.sequences(LIMIT)
    expected = rows_of(engine, ids)

    for size in (1, sum(map(len, ids)), 7 * sum(map(len, ids))):
        monkeypatch.setattr(sparse, "_LOGITS_AT_ONCE", size)
        np.testing.assert_allclose(rows_of(engine, ids), expected, rtol=1e-5, atol=1e-6)


def test_a_span_makes_a_row_of_its_tokens(folder: Path) -> None:
    engine = make_engine(folder)
    ids = [[5, 9, 11, 13], [7, 8]]

    tokens = rows_of(engine, ids, spans=[[(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2)]])
    whole = rows_of(engine, ids)

    np.testing.assert_allclose(tokens[:4].max(axis=0), whole[0], rtol=1e-6)
    np.testing.assert_allclose(tokens[4], whole[1], rtol=1e-6)


def test_columns_beyond_those_asked_for_do_not_count(folder: Path) -> None:
    engine = make_engine(folder)
    whole = rows_of(engine, [[5, 9], [7, 8]])

    cut = rows_of(engine, [[5, 9], [7, 8]], dimensions=[10, VOCAB_SIZE])

    np.testing.assert_array_equal(cut[0, 10:], 0)
    np.testing.assert_allclose(cut[0, :10], whole[0, :10], rtol=1e-6)
    np.testing.assert_allclose(cut[1], whole[1], rtol=1e-6)


def test_a_row_that_is_not_finite_is_marked_and_empty(folder: Path) -> None:
    output = make_engine(folder)._runner._output  # type: ignore[attr-defined]  # a CPU's runner
    batch = make_batch([[5, 9], [7, 8, 6]], width=VOCAB_SIZE, encodings=[SPARSE] * 2)
    ragged, _ = load_sorted(batch, ReferenceAttention())
    hidden = torch.randn(5, 32)
    hidden[3, 4] = torch.nan

    with torch.inference_mode():
        made = output(hidden, ragged).numpy()
    rows = sparse.compress(Rows(made[:, 4:].copy(), made[:, 0]), batch.dimensions)

    assert rows.finite.tolist() == [1, 0]
    assert len(read_sparse(rows.rows[0])[0]) > 0
    assert len(read_sparse(rows.rows[1])[0]) == 0


def test_rows_without_values_are_a_count_of_none() -> None:
    values = np.zeros((3, 8), dtype=np.float32)

    rows = sparse.compress(Rows(values.view(np.uint8), np.ones(3, dtype=np.uint8)), np.full(3, 8, dtype=np.int32))

    assert rows.rows.shape == (3, 4)
    assert not rows.rows.any()


def test_rows_that_no_message_holds_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "MAX_FRAME_BYTES", 3 * (4 + 8 * 8) - 1)
    values = np.ones((3, 8), dtype=np.float32)

    with pytest.raises(RuntimeError, match="3 sparse rows of up to 68 bytes"):
        sparse.compress(Rows(values.view(np.uint8), np.ones(3, dtype=np.uint8)), np.full(3, 8, dtype=np.int32))


def test_other_encodings_are_refused(folder: Path) -> None:
    engine = make_engine(folder)

    with pytest.raises(BadBatch, match="encodings"):
        engine.step(make_batch([[5, 9]], width=VOCAB_SIZE))


def test_a_head_computes_in_float32_whatever_the_body_does(folder: Path) -> None:
    ids = parity.sequences(LIMIT)
    expected = rows_of(make_engine(folder), ids).ravel()

    rows = rows_of(make_engine(folder, dtype="bfloat16"), ids).ravel()

    assert rows @ expected / np.linalg.norm(rows) / np.linalg.norm(expected) > 0.999


# --- weights ---


def retensor(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    tensors = load_file(folder / WEIGHTS) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_a_decoder_of_its_own_counts_whatever_the_config_says(family: str, tied: bool, tmp_path: Path) -> None:
    model = masked(family, tie_word_embeddings=False)
    folder = save(save_bare(model, tmp_path / "bare"), tmp_path / "splade")
    edit_json(folder / "config.json", tie_word_embeddings=tied)
    expected = reference(folder)

    check(make_engine(folder), expected)
    same = save(save_bare(masked(family), tmp_path / "tied"), tmp_path / "same")
    assert np.abs(expected - reference(same)).max() > 1e-2


@pytest.mark.slow
def test_a_bias_may_have_either_name(folder: Path) -> None:
    expected = reference(folder)
    bias = load_file(folder / WEIGHTS)["cls.predictions.bias"]

    retensor(folder, cls__predictions__bias=None, cls__predictions__decoder__bias=bias)

    check(make_engine(folder), expected)
    retensor(folder, cls__predictions__bias=bias + 1)  # which transformers then leaves alone
    check(make_engine(folder), reference(folder))
    check(make_engine(folder), expected)


def test_former_names_of_a_norm_are_understood(folder: Path) -> None:
    ids = parity.sequences(LIMIT)
    expected = rows_of(make_engine(folder), ids)
    tensors = load_file(folder / WEIGHTS)

    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / WEIGHTS)

    np.testing.assert_array_equal(rows_of(make_engine(folder), ids), expected)


def test_a_wrapper_around_all_names_is_taken_off(folder: Path) -> None:
    ids = parity.sequences(LIMIT)
    expected = rows_of(make_engine(folder), ids)
    tensors = load_file(folder / WEIGHTS)
    decoder = {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()}

    save_file({f"_orig_mod.{name}": tensor for name, tensor in (tensors | decoder).items()}, folder / WEIGHTS)

    np.testing.assert_array_equal(rows_of(make_engine(folder), ids), expected)


@pytest.mark.slow
def test_a_language_model_from_pre_training_has_the_same_head(folder: Path) -> None:
    retensor(folder, cls__seq_relationship__weight=torch.ones(2, 32), cls__seq_relationship__bias=torch.ones(2))
    edit_json(folder / "config.json", architectures=["BertForPreTraining"])

    check(make_engine(folder), reference(folder))


@pytest.mark.parametrize(
    "name",
    ["cls.predictions.transform.dense.weight", "cls.predictions.transform.LayerNorm.bias", "cls.predictions.bias"],
)
def test_a_head_without_weights_is_refused(folder: Path, name: str) -> None:
    retensor(folder, **{name: None})

    with pytest.raises(ModelError, match=rf"Missing tensors: {name}"):
        make_engine(folder)


def test_a_decoder_that_is_neither_stored_nor_tied_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=False)

    with pytest.raises(ModelError, match=r"decoder\.weight is missing, and .*tie_word_embeddings"):
        make_engine(folder)


def test_a_decoder_of_another_shape_is_refused(folder: Path) -> None:
    retensor(folder, cls__predictions__decoder__weight=torch.ones(VOCAB_SIZE, 31))

    with pytest.raises(ModelError, match=r"tensor cls\.predictions\.decoder\.weight"):
        make_engine(folder)


# --- what folders say ---


@pytest.mark.slow
def test_files_of_earlier_releases_mean_the_same(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path)
    entries = json.loads((folder / "modules.json").read_text())
    package = "sentence_transformers.sparse_encoder.models"
    for entry, kind in zip(entries, ("MLMTransformer", "SpladePooling"), strict=True):
        entry["type"] = f"{package}.{kind}"
    write_json(folder / "modules.json", entries)
    write_json(folder / TRANSFORMER, {"max_seq_length": LIMIT, "do_lower_case": False})
    fields = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": VOCAB_SIZE}
    write_json(folder / POOLING, fields)

    check(make_engine(folder), reference(folder))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (POOLING, {"pooling_strategy": "mean"}, "pooling_strategy: 'max' or 'sum' is needed"),
        (POOLING, {"activation_function": "gelu"}, "activation_function: 'relu' or 'log1p_relu' is needed"),
        (POOLING, {"embedding_dimension": 97}, "embedding_dimension: 97, but the vocabulary has 96"),
        (POOLING, {"top_k": 10}, "top_k: a field that is not understood"),
        (SETTINGS, {"max_active_dims": 64}, "max_active_dims: a field that is not understood"),
        (SETTINGS, {"truncate_dim": 64}, "truncate_dim: a field that is not understood"),
        (SETTINGS, {"model_type": "SentenceTransformer"}, "model_type: 'SentenceTransformer', but its modules"),
        (TRANSFORMER, {"transformer_task": None}, "transformer_task: missing; 'fill-mask' is needed"),
        (TRANSFORMER, {"transformer_task": "feature-extraction"}, "transformer_task: only 'fill-mask'"),
        (TRANSFORMER, {"modality_config": {"text": {"method": "forward"}}}, "modality_config: only"),
        ("config.json", {"architectures": ["BertModel"]}, "sparse rows of a BertModel are not supported"),
        ("config.json", {"architectures": ["ModernBertForMaskedLM"]}, "sparse rows of a ModernBertForMaskedLM are"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(folder: Path, file: str, changes: dict[str, object], message: str) -> None:
    edit_json(folder / file, **changes)

    with pytest.raises(ModelError, match=rf"{file}: .*{message}"):
        Checkpoint.read(folder)


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_splade_is_for_nothing_else(folder: Path, task: str) -> None:
    with pytest.raises(ModelError, match=rf"--task {task}: .* a BertForMaskedLM that is for --task sparse"):
        make_engine(folder, task=task)


def test_only_a_masked_language_model_is_made_a_splade(bare: Path, tmp_path: Path) -> None:
    folder = save_bare(masked(), tmp_path)
    for architecture in ("BertModel", "BertForPreTraining"):
        edit_json(folder / "config.json", architectures=[architecture])
        with pytest.raises(ModelError, match=f"a masked language model is needed, not a {architecture}"):
            make_engine(folder, task="sparse")


# --- on a CUDA device ---


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_the_rows_of_a_cpu(bare: Path, strategy: str, dtype: str, tmp_path: Path) -> None:
    folder = save(bare, tmp_path / "splade", SpladePooling(strategy))
    ids = parity.sequences(LIMIT)
    expected = rows_of(make_engine(folder), ids)

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))

    for _ in range(3):  # eager, captured or eager again, replayed
        # In another batch other kernels multiply, which round in another order.
        for rows, exact in ((rows_of(engine, ids), expected), (rows_of(engine, ids[2:4]), expected[2:4])):
            if dtype == "float32":
                np.testing.assert_allclose(rows, exact, rtol=1e-4, atol=1e-4)
            cosine = (rows * exact).sum() / np.linalg.norm(rows) / np.linalg.norm(exact)
            assert cosine > 0.999


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_logits_of_a_large_step_never_exist_at_once(tmp_path: Path) -> None:
    config = {"vocab_size": 30_522, "max_position_embeddings": 512}
    folder = save_bare(masked(**config), tmp_path / "bare")
    edit_json(folder / "tokenizer_config.json", model_max_length=512)
    options = {"device": "cuda", "task": "sparse", "cache_dir": str(tmp_path / "cache"), "max_batch_tokens": "16384"}
    engine = make_engine(folder, **options)
    ids = [[3 + token % 90 for token in range(start, start + 512)] for start in range(32)]
    step(engine, ids)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    rows = step(engine, ids)

    assert rows.finite.all()
    assert torch.cuda.max_memory_allocated() - before < 16_384 * 30_522 * 4 // 4
