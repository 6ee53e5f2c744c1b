"""Every architecture of the table against transformers' own class: vectors, names, fields, dtypes, refusals.

A new family is tested by its rows here and by its entries in `tests/families.py` and `tests/refusals.py`. What is
peculiar to one stands in a file beside this one. Classifiers' heads are in `test_scores.py`, those of masked language
models in `test_sparse.py`.

The faults that these tests are for: a flag that is read and forgotten (attention that stays causal), a window one key
too narrow, positions that begin elsewhere, a default that is taken for the truth, a weight that stays random.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModel

from tests import parity
from tests.families import FLIPS, LIMIT, SCALINGS, TAKEN, TRAINED, VARIANTS, Fields, declared, save, tiny
from tests.models import edit_json, embed, make_batch, random_sequences
from tests.parity import VOCAB_SIZE
from tests.reference import unit
from tests.refusals import REFUSED
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.architectures import ARCHITECTURES, check_dtype
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.checkpoint.weights import Weights, fit, open_weights
from worker.models import families
from worker.models.build import build
from worker.models.loader import load_weights

BODIES = [row.name for row in ARCHITECTURES.values() if row.score_head is None]

# One architecture a family.
FAMILIES = list({row.family: row.name for row in reversed(ARCHITECTURES.values()) if row.kind == "body"}.values())


def cases(table: dict[str, list[Fields]]) -> list[object]:
    return [
        pytest.param(name, changes, id=f"{name}-{'-'.join(changes) or 'as-it-is'}-{index}")
        for name, of_family in table.items()
        for index, changes in enumerate(of_family)
    ]


def one_sequence() -> list[list[int]]:
    """Without any token that pads in one of the models."""
    return [[8 + token for token in random_sequences([60], seed=4, vocab_size=VOCAB_SIZE - 8)[0]]]


def loaded(folder: Path, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(checkpoint.folder, model.to(dtype))
    return model


# --- the table ---


def test_every_family_is_a_module_and_has_rows() -> None:
    shared = {"decoder", "reading"}
    modules = {module.name for module in pkgutil.iter_modules(families.__path__)} - shared

    assert {row.family for row in ARCHITECTURES.values()} == modules
    assert all(hasattr(importlib.import_module(f"worker.models.families.{name}"), "build") for name in modules)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_agrees_with_the_name_that_transformers_gives(name: str) -> None:
    row = ARCHITECTURES[name]

    assert name.endswith("ForSequenceClassification") == (row.score_head is not None)
    assert name.endswith("ForMaskedLM") == (row.kind == "masked_lm")
    assert name.endswith("ForCausalLM") == (row.kind == "causal_lm")
    assert row.chunking_code is None or row.chunking_code in row.own_code
    assert hasattr(transformers, name) or row.own_code or row.family == "nomic_bert"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_dtype_that_overflows_is_refused_with_what_to_use(name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        check_dtype(name, dtype)
    if not name.startswith("Gemma"):
        check_dtype(name, "float16")
        return
    with pytest.raises(ModelError, match=rf"--dtype float16: a {name} overflows in it; use bfloat16 or float32"):
        check_dtype(name, "float16")


# --- vectors ---


@pytest.mark.parametrize("name", BODIES)
def test_the_vectors_are_those_of_transformers_and_no_head_is_read(name: str, tmp_path: Path) -> None:
    model = parity.seeded(tiny(name))
    of_body = set(map(id, model.base_model.parameters()))
    for parameter in model.parameters():
        if id(parameter) not in of_body:
            parameter.data.fill_(torch.nan)

    engine = make_engine(parity.save(model, tmp_path, **declared(name)))

    ids = parity.sequences(LIMIT)
    assert (engine.hello().architecture, engine.hello().max_tokens) == (name, LIMIT)
    parity.check_rows(engine, ids, parity.reference_rows(model.base_model, ids))


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), cases(VARIANTS))
def test_a_variants_vectors_are_those_of_transformers(name: str, changes: Fields, tmp_path: Path) -> None:
    parity.check(tiny(name, **changes), tmp_path, LIMIT, **declared(name))


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), cases(TAKEN))
def test_what_other_releases_write_and_what_does_not_matter_is_taken(
    name: str, changes: Fields, tmp_path: Path
) -> None:
    parity.check(tiny(name), tmp_path, LIMIT, **changes)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen2Model", "MistralModel", "LlamaModel", "GemmaModel"])
def test_scaled_positions_are_those_of_transformers_below_and_above_the_trained_length(
    name: str, kind: str, tmp_path: Path
) -> None:
    scaling = {"rope_type": kind, "rope_theta": 1000.0, **SCALINGS[kind]}
    positions = TRAINED if kind == "dynamic" else LIMIT

    parity.check(tiny(name, rope_parameters=scaling, max_position_embeddings=positions), tmp_path, LIMIT)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "built", "change"),
    [
        pytest.param(name, built, change, id=f"{name}-{'-'.join([*built, *change])}-{index}")
        for name, built, changes in FLIPS
        for index, change in enumerate(changes)
    ],
)
def test_a_field_of_config_json_alone_changes_the_vectors_as_it_does_in_transformers(
    name: str, built: Fields, change: Fields, tmp_path: Path
) -> None:
    folder = parity.save(parity.seeded(tiny(name, **built)), tmp_path)
    ids = one_sequence()
    before = parity.rows_of(folder, ids)

    edit_json(folder / "config.json", **change)

    after = parity.rows_of(folder, ids)
    library = parity.reference_rows(AutoModel.from_pretrained(folder).eval(), ids)
    np.testing.assert_allclose(after, library, rtol=0, atol=1e-5)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "NomicBertModel", "GteModel"])
def test_a_second_text_has_the_second_type_where_there_is_one(name: str, tmp_path: Path) -> None:
    model = parity.seeded(tiny(name, type_vocab_size=2))
    engine = make_engine(parity.save(model, tmp_path))
    ids, types = one_sequence(), torch.tensor([[0] * 20 + [1] * 40])

    rows = embed(engine, ids, type_starts=[20])

    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids), token_type_ids=types).last_hidden_state.mean(dim=1)
    np.testing.assert_allclose(rows, expected.numpy(), rtol=0, atol=1e-5)
    assert np.abs(rows - parity.reference_rows(model, ids)).max() > 1e-3


# --- dtypes ---


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("ModernBertModel", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
        ("Gemma3TextModel", {"use_bidirectional_attention": False, "query_pre_attn_scalar": 40}),
        (
            "Qwen2Model",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
            },
        ),
    ],
)
def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(
    name: str, changes: Fields, tmp_path: Path
) -> None:
    model = parity.seeded(tiny(name, **changes))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = parity.save(model, tmp_path, **declared(name))
    ragged, _ = load_sorted(make_batch(one_sequence()), SdpaAttention())

    ours = loaded(folder, torch.bfloat16)
    exact, rounded = (ours(dataclasses.replace(ragged, reference=reference)) for reference in (True, False))

    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    row = exact.mean(dim=0, keepdim=True).numpy()
    np.testing.assert_allclose(row, parity.reference_rows(model, one_sequence()), rtol=0, atol=1e-5)
    assert lowest_cosine(rounded.float().mean(dim=0, keepdim=True).numpy(), row) >= 0.999


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_that_config_json_declares_changes_nothing(field: str, tmp_path: Path) -> None:
    folder = save("Qwen3Model", tmp_path, **{"dtype": None, field: "float16"})

    assert make_engine(folder).hello().dtype == "float32"


# --- weights ---


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BODIES)
def test_every_tensor_is_needed_by_its_exact_name_and_no_parameter_is_left_random(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    parts = model.checkpoint_tensors()
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}

    with open_weights(folder) as weights:
        whole = fit(weights, shapes, model.canonical_name)
        (file,) = weights.files
        for part, stored in whole.filled.items():
            held = {key: tensor for key, tensor in file.tensors.items() if key != stored.name}
            without = Weights(weights.source, [dataclasses.replace(file, tensors=held)])
            problems = fit(without, shapes, model.canonical_name).problems
            assert len(problems) == 1
            assert f"Missing tensors: {part}. Unexpected tensors: none." in problems[0]
            renamed = {f"{key}s" if key == stored.name else key: tensor for key, tensor in file.tensors.items()}
            renamed[f"{stored.name}s"] = dataclasses.replace(stored, name=f"{stored.name}s")
            with_another = Weights(weights.source, [dataclasses.replace(file, tensors=renamed)])
            (problem,) = fit(with_another, shapes, model.canonical_name).problems
            assert f"Missing tensors: {part}. Unexpected tensors: {stored.name}s." in problem
    assert (whole.problems, whole.filled.keys()) == ([], parts.keys())
    filled = sum(part.numel() for part in parts.values())
    assert filled == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "flag", "tensor"),
    [
        ("Qwen3Model", "attention_bias", r"self_attn\.o_proj\.bias"),
        ("LlamaModel", "attention_bias", r"self_attn\.o_proj\.bias"),
        ("LlamaModel", "mlp_bias", r"mlp\.down_proj\.bias"),
        ("GemmaModel", "attention_bias", r"self_attn\.o_proj\.bias"),
        ("Gemma3TextModel", "attention_bias", r"self_attn\.o_proj\.bias"),
        ("ModernBertModel", "attention_bias", r"attn\.Wo\.bias"),
        ("ModernBertModel", "mlp_bias", r"mlp\.Wi\.bias"),
        ("ModernBertModel", "norm_bias", r"embeddings\.norm\.bias"),
    ],
)
def test_biases_that_config_json_and_the_weights_do_not_agree_on_are_neither_left_random_nor_left_out(
    name: str, flag: str, tensor: str, tmp_path: Path
) -> None:
    without = parity.save(tiny(name), tmp_path / "without", **{flag: True})
    within = parity.save(tiny(name, **{flag: True}), tmp_path / "within", **{flag: False})

    with pytest.raises(ModelError, match=rf"Missing tensors: .*{tensor}.*Unexpected tensors: none"):
        make_engine(without)
    with pytest.raises(ModelError, match=rf"Missing tensors: none.*Unexpected tensors: .*{tensor}"):
        make_engine(within)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [row.name for row in ARCHITECTURES.values() if row.kind == "causal_lm"])
def test_a_language_models_head_may_be_stored_or_tied(name: str, tied: bool, tmp_path: Path) -> None:
    model = parity.seeded(tiny(name, tie_word_embeddings=tied))

    rows = parity.rows_of(parity.save(model, tmp_path), one_sequence())

    np.testing.assert_allclose(rows, parity.reference_rows(model.base_model, one_sequence()), rtol=0, atol=1e-5)


# --- refusals ---


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each architecture; only its config.json is to be changed, in a copy."""
    return {name: save(name, tmp_path_factory.mktemp("good") / "model") for name in REFUSED}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        pytest.param(name, changes, message, id=f"{name}-{'-'.join(changes)}-{index}")
        for name, refused in REFUSED.items()
        for index, (changes, message) in enumerate(refused)
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    name: str, changes: Fields, message: str, good: dict[str, Path], tmp_path: Path
) -> None:
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(good[name] / file)
    config = json.loads((good[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_the_configurations_that_are_changed_are_good(name: str, good: dict[str, Path]) -> None:
    make_engine(good[name])


# --- GPUs ---

_WIDE: Fields = {"hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 1024}
_GEMMA3: Fields = _WIDE | {"num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
ON_GPUS: dict[str, list[Fields]] = {
    "BertModel": [_WIDE],
    "RobertaModel": [_WIDE | {"max_position_embeddings": 1026}],
    "DistilBertModel": [{"dim": 256, "hidden_dim": 768, "max_position_embeddings": 1024}],
    "MPNetModel": [_WIDE | {"max_position_embeddings": 1026}],
    "NomicBertModel": [_WIDE],
    "GteModel": [_WIDE | {"type_vocab_size": num_types} for num_types in (0, 1, 2)],
    "ModernBertModel": [
        _WIDE | {"local_attention": 128, "norm_bias": biased, "attention_bias": biased, "mlp_bias": biased}
        for biased in (False, True)
    ],
    "GemmaModel": [_WIDE | {"head_dim": 256}],
    "Gemma3TextModel": [
        _GEMMA3 | {"sliding_window": 128, **changes}
        for changes in (
            {"use_bidirectional_attention": True},
            {"use_bidirectional_attention": False},
            {"query_pre_attn_scalar": 168, "attention_bias": True, "head_dim": 128},
        )
    ],
    "Qwen3Model": [_WIDE | {"head_dim": 64}],
    "PPLXQwen3Model": [_WIDE | {"head_dim": 64}],
    "Qwen2Model": [_WIDE],
    "MistralModel": [_WIDE | {"sliding_window": 64}],
    "LlamaModel": [_WIDE | {"attention_bias": True, "mlp_bias": True}],
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("name", "changes"), cases(ON_GPUS))
def test_a_cuda_device_gives_nearly_the_vectors_of_the_cpu(
    name: str, changes: Fields, dtype: str, tmp_path: Path
) -> None:
    if dtype in ARCHITECTURES[name].overflowing_dtypes:
        return
    model = parity.seeded(tiny(name, **changes))
    folder = parity.save(model, tmp_path / "model", **declared(name))
    ids = [[3 + token for token in row] for row in random_sequences([1, 3, 64, 65, 66, 129, 400, 1024, 20, 20], 4, 93)]
    expected = parity.rows_of(folder, ids)

    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))
    width = engine.hello().dimensions
    rows = embed(engine, ids, width=width)

    assert lowest_cosine(rows, expected) >= (0.99999 if dtype == "float32" else 0.999)
    alone = np.concatenate([embed(engine, [row], width=width) for row in ids])
    assert lowest_cosine(rows, alone) >= 0.999


def lowest_cosine(rows: parity.Rows, expected: parity.Rows) -> float:
    return float((unit(rows) * unit(expected)).sum(axis=1).min())
