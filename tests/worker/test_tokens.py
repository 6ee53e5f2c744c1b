"""A row for each token: of any embedding model, and of models that are for that, against sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel, Qwen3Config, Qwen3Model
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.text.tokenization import Tokenizer, TruncationRule
from tests import parity
from tests.models import edit_json, make_batch, tokenizer, write_json
from tests.parity import VOCAB_SIZE
from tests.worker.conftest import make_engine
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.engine.engine import Engine

WIDTH = 32
LIMIT = 40
FEATURE = "token_embeddings"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"

TEXTS = ["w3", "w5 w9 w5 w55 w9", "W5 w9", " ".join(f"w{3 + 7 * i % 53}" for i in range(LIMIT + 20)), "w9 w5 w5 w55 w9"]
TEXTS += [" ".join(f"w{5 * i % 57}" for i in range(length)) for length in (6, 7, 30, 31)]

SHAPE = {"hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LIMIT}

Rows = npt.NDArray[np.float32]  # [tokens, columns]


def save_bare(model: PreTrainedModel, folder: Path) -> Path:
    parity.seeded(model).save_pretrained(folder)
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[UNK]"}
    words = tokenizer(VOCAB_SIZE - 3)
    FastTokenizer(tokenizer_object=words, model_max_length=LIMIT, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bare(BertModel(BertConfig(**SHAPE)), tmp_path_factory.mktemp("bare"))


def seed(modules: tuple[nn.Module, ...]) -> None:
    generator = torch.Generator().manual_seed(len(modules))
    with torch.no_grad():
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5 * noise)


def save(bare: Path, folder: Path, *modules: nn.Module, **options: object) -> Path:
    """What sentence-transformers writes of a late-interaction model with these modules; their weights are random."""
    seed(modules)
    model = MultiVectorEncoder(modules=[Transformer(str(bare)), *modules], device="cpu", **options)
    model.save(str(folder), create_model_card=False)
    return folder


def dense(inputs: int = WIDTH, outputs: int = 16, **options: object) -> Dense:
    """A projection of tokens, as late-interaction models have it."""
    fields = {"bias": False, "activation_function": nn.Identity(), "module_input_name": FEATURE} | options
    return Dense(inputs, outputs, **fields)


def colbert(bare: Path, folder: Path, **options: object) -> Path:
    """What sentence-transformers' own default is, but that the weights of a start are random for us, too."""
    return save(bare, folder, dense(), MultiVectorMask(), Normalize(module_input_name=FEATURE), **options)


def rows_of(engine: Engine, texts: list[str] = TEXTS, prompt: str = "") -> list[Rows]:
    """One row for each token of each text, as a gateway asks for them where the client says nothing more."""
    facts = engine.hello()
    encoded = Tokenizer(facts).encode([prompt + text for text in texts], TruncationRule(allowed=True))
    ids = [row.tolist() for row in encoded]
    batch = make_batch(
        ids,
        width=facts.dimensions,
        normalize=[int(facts.normalize)] * len(ids),
        spans=[[(place, place + 1) for place in range(len(row))] for row in ids],
    )
    rows: Rows = engine.step(batch).numpy().rows.view(np.float32)
    return np.split(rows, np.cumsum([len(row) for row in ids])[:-1])


def check(engine: Engine, expected: list[Rows], prompt: str = "") -> None:
    """All at once, and each alone."""
    together = rows_of(engine, prompt=prompt)
    alone = [rows_of(engine, [text], prompt)[0] for text in TEXTS]
    for made in (together, alone):
        assert [rows.shape for rows in made] == [rows.shape for rows in expected]
        np.testing.assert_allclose(np.concatenate(made), np.concatenate(expected), rtol=1e-5, atol=1e-5)


# --- of models that embed ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_a_row_of_one_token_is_its_hidden_state_whatever_is_pooled_by(bare: Path, mode: str, tmp_path: Path) -> None:
    model = SentenceTransformer(modules=[Transformer(str(bare)), Pooling(WIDTH, mode), Normalize()], device="cpu")
    model.save(str(tmp_path), create_model_card=False)
    engine = make_engine(tmp_path)
    states = [row.numpy() for row in model.encode(TEXTS, batch_size=3, output_value="token_embeddings")]

    assert engine.hello().tasks == ["embed", "tokens"]
    assert engine.hello().normalize
    check(engine, [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in states])


@pytest.mark.slow
def test_a_language_model_has_rows_of_tokens_too(tmp_path: Path) -> None:
    config = Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16)
    folder = save_bare(Qwen3Model(config), tmp_path / "bare")
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(WIDTH, "lasttoken")], device="cpu")
    model.save(str(tmp_path / "model"), create_model_card=False)

    expected = [row.numpy() for row in model.encode(TEXTS, batch_size=3, output_value="token_embeddings")]

    check(make_engine(tmp_path / "model"), expected)


@pytest.mark.parametrize(
    "modules",
    [
        (Pooling(WIDTH, ("cls", "mean")),),
        (Pooling(WIDTH, "mean"), Dense(WIDTH, 16)),
        (Pooling(WIDTH, "mean"), Dense(WIDTH, 16), Normalize()),
    ],
    ids=["several poolings", "a stage", "a stage and a norm"],
)
def test_where_more_becomes_of_a_row_it_is_not_a_tokens(
    bare: Path, modules: tuple[nn.Module, ...], tmp_path: Path
) -> None:
    model = SentenceTransformer(modules=[Transformer(str(bare)), *modules], device="cpu")
    model.save(str(tmp_path), create_model_card=False)

    assert Checkpoint.read(tmp_path).tasks == ["embed"]


# --- of models that are for that ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        (dense(), MultiVectorMask(), Normalize(module_input_name=FEATURE)),
        (dense(), Normalize(module_input_name=FEATURE)),
        (dense(),),
        (Normalize(module_input_name=FEATURE), dense(bias=True, activation_function=nn.Tanh())),
        (dense(outputs=24, use_residual=True), dense(24, 16), MultiVectorMask(skiplist_tasks=["query"])),
        (MultiVectorMask(),),
    ],
    ids=["default", "no mask", "no norm", "a norm first", "two", "a mask alone"],
)
def test_a_late_interaction_model_has_the_rows_of_sentence_transformers(
    bare: Path, modules: tuple[nn.Module, ...], tmp_path: Path
) -> None:
    folder = save(bare, tmp_path, *modules)
    engine = make_engine(folder)
    model = MultiVectorEncoder(str(folder), device="cpu")

    assert (engine.hello().tasks, engine.hello().encodings) == (["tokens"], ["float32"])
    check(engine, model.encode_document(TEXTS, batch_size=3, convert_to_numpy=True))
    check(engine, model.encode_query(TEXTS, batch_size=3, convert_to_numpy=True))


@pytest.mark.slow
def test_prompts_of_queries_and_documents_are_those_of_the_folder(bare: Path, tmp_path: Path) -> None:
    prompts = {"query": "w50 ", "document": "w51 w52 "}
    folder = colbert(bare, tmp_path, prompts=prompts)
    engine = make_engine(folder)
    model = MultiVectorEncoder(str(folder), device="cpu")

    assert engine.hello().prompts == prompts
    check(engine, model.encode_query(TEXTS, convert_to_numpy=True), "w50 ")
    check(engine, model.encode_document(TEXTS, convert_to_numpy=True), "w51 w52 ")


def test_facts_tell_the_width_of_a_tokens_row(bare: Path, tmp_path: Path) -> None:
    facts = make_engine(colbert(bare, tmp_path)).hello()

    assert (facts.dimensions, facts.normalize, facts.max_tokens) == (16, True, LIMIT)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("2_MultiVectorMask/config.json", {"skiplist_words": ["."]}, "skiplist_words: models that leave out"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [5]}, "keep_only_token_ids: models that leave out"),
        ("2_MultiVectorMask/config.json", {"other": 1}, "other: a field that is not understood"),
        ("1_Dense/config.json", {"module_input_name": None}, "module_input_name: only 'token_embeddings' is supported"),
        ("1_Dense/config.json", {"module_output_name": "other"}, "module_output_name: only 'token_embeddings' is"),
        ("1_Dense/config.json", {"in_features": 31}, "in_features: 31, but the rows that come are 32 wide"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name: only 'token_emb"),
        (TRANSFORMER, {"query_expansion": {"strategy": "fixed", "length": 32}}, "query_expansion: only None"),
        (TRANSFORMER, {"query_length": 32}, "query_length: only None"),
        (TRANSFORMER, {"document_length": 32}, "document_length: only None"),
        (TRANSFORMER, {"transformer_task": "retrieval"}, "transformer_task: only 'feature-extraction'"),
        (SETTINGS, {"model_type": "ColBERT"}, "model_type: 'ColBERT', but its modules are those of a MultiVectorEnc"),
        (SETTINGS, {"model_type": None}, "model_type: 'SentenceTransformer', but its modules are those of a"),
        (SETTINGS, {"query_prefix": "[Q] "}, "query_prefix: a field that is not understood"),
        (SETTINGS, {"truncate_dim": 8}, "truncate_dim: a field that is not understood"),
    ],
    ids=str,
)
def test_what_would_change_which_tokens_have_rows_or_what_they_are_is_refused(
    bare: Path, file: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = colbert(bare, tmp_path)
    edit_json(folder / file, **changes)

    with pytest.raises(ModelError, match=rf"{file}: .*{message}"):
        Checkpoint.read(folder)


def test_a_module_that_needs_one_row_a_text_does_not_follow_tokens(bare: Path, tmp_path: Path) -> None:
    folder = colbert(bare, tmp_path)
    entries = json.loads((folder / "modules.json").read_text())
    entries[3]["type"] = "sentence_transformers.models.LayerNorm"
    write_json(folder / "modules.json", entries)

    with pytest.raises(ModelError, match=r"modules\.json: type: .* supported, not .*'LayerNorm'"):
        Checkpoint.read(folder)


@pytest.mark.parametrize("task", ["embed", "score", "sparse"])
def test_a_late_interaction_model_is_for_nothing_else(bare: Path, task: str, tmp_path: Path) -> None:
    folder = colbert(bare, tmp_path)

    with pytest.raises(ModelError, match=rf"--task {task}: .* a BertModel that is for rows of tokens"):
        make_engine(folder, task=task)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_gpu_gives_the_rows_of_a_cpu(bare: Path, dtype: str, is_late: bool, tmp_path: Path) -> None:
    folder = colbert(bare, tmp_path / "model") if is_late else bare
    expected = np.concatenate(rows_of(make_engine(folder)))

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))

    for _ in range(3):  # eager, captured or eager again, replayed
        rows = np.concatenate(rows_of(engine))
        if dtype == "float32":
            np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)
        cosines = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() > 0.99
