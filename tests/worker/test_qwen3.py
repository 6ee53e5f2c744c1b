"""The Qwen3 family against the plain reference and transformers: both directions of attention, names, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.text.tokenization import Tokenizer, TruncationRule
from tests.models import (
    embed,
    make_batch,
    pplx_config,
    qwen3_config,
    qwen3_tensors,
    random_sequences,
    tokenizer,
    write_bert,
    write_json,
    write_pplx,
    write_qwen3,
)
from tests.reference import Qwen3Reference
from tests.variants import QWEN3_TEXTS, QWEN3_VARIANTS
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.loader import load_weights
from worker.models.pooling import pool
from worker.process.inspection import Inspection

REFERENCE = Path(__file__).parent.parent / "data" / "qwen3_reference.npz"
SEQUENCES = random_sequences([1, 7, 48, 7, 2])


@pytest.mark.parametrize("name", QWEN3_VARIANTS)
def test_a_checkpoint_gives_the_vectors_that_transformers_gives(name: str, tmp_path: Path) -> None:
    engine = make_engine(QWEN3_VARIANTS[name](tmp_path))
    facts = engine.hello()
    ids = [row.tolist() for row in Tokenizer(facts).encode(QWEN3_TEXTS, TruncationRule(allowed=True))]

    rows = embed(engine, ids, normalize=[int(facts.normalize)] * len(ids))

    with np.load(REFERENCE, allow_pickle=False) as reference:
        np.testing.assert_allclose(rows, reference[name], rtol=0, atol=1e-5)


def test_the_variants_differ_so_that_each_of_them_is_tested() -> None:
    with np.load(REFERENCE, allow_pickle=False) as reference:
        rows = {name: reference[name] for name in QWEN3_VARIANTS}
    assert all(np.abs(rows[a] - rows[b]).max() > 0.1 for a in rows for b in rows if a < b)
    # Of the same words in another order.
    assert all(np.abs(values[1] - values[3]).max() > 0.01 for values in rows.values())


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_equal_the_reference(tmp_path: Path, num_kv_heads: int) -> None:
    folder = write_qwen3(tmp_path, config=qwen3_config(num_key_value_heads=num_kv_heads))

    rows = embed(make_engine(folder), SEQUENCES)

    reference = Qwen3Reference(folder, causal=True)
    np.testing.assert_allclose(rows, np.stack([reference.embed(s) for s in SEQUENCES]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pplx_embed_sees_every_token(tmp_path: Path, pooling: str) -> None:
    folder = write_pplx(tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(
        {"mean": '{"pooling_mode_mean_tokens": true}', "last": '{"pooling_mode_lasttoken": true}'}[pooling]
    )

    rows = embed(make_engine(folder), SEQUENCES)

    reference = Qwen3Reference(folder, causal=False)
    np.testing.assert_allclose(rows, np.stack([reference.embed(s, pooling) for s in SEQUENCES]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("write", [write_qwen3, write_pplx])
def test_a_sequence_alone_and_in_company_has_the_same_row(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    engine = make_engine(write(tmp_path))
    generator = np.random.default_rng(0)
    sequences = random_sequences(generator.integers(1, 49, 12).tolist())
    order = generator.permutation(len(sequences))

    together = embed(engine, sequences)
    shuffled = embed(engine, [sequences[i] for i in order])

    alone = np.concatenate([embed(engine, [sequence]) for sequence in sequences])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(shuffled, alone[order], rtol=0, atol=1e-5)


def test_a_causal_model_does_not_look_ahead(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "causal", pooling="pooling_mode_cls_token")
    twin = write_qwen3(tmp_path / "not", config=qwen3_config(is_causal=False), pooling="pooling_mode_cls_token")

    rows, twins = (embed(make_engine(path), [[5, 6, 7], [5, 8, 9]]) for path in (folder, twin))

    np.testing.assert_allclose(rows[0], rows[1], atol=1e-6)
    assert np.abs(twins[0] - twins[1]).max() > 0.01


def test_bfloat16_weights_run_near_their_float32_values(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in qwen3_tensors(qwen3_config()).items()}
    folder = write_qwen3(tmp_path, tensors=tensors)
    ones = [1] * len(SEQUENCES)

    rows = embed(make_engine(folder, dtype="bfloat16"), SEQUENCES, normalize=ones)

    exact = embed(make_engine(folder, dtype="float32"), SEQUENCES, normalize=ones)
    assert (rows * exact).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("causal", [True, False])
def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path, causal: bool) -> None:
    config = qwen3_config(is_causal=causal)
    tensors = {name: tensor.bfloat16() for name, tensor in qwen3_tensors(config).items()}
    folder = write_qwen3(tmp_path, config=config, tensors=tensors)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model.to(torch.bfloat16))
    ragged, restore = load_sorted(make_batch(SEQUENCES), SdpaAttention())

    hidden = model(dataclasses.replace(ragged, reference=True))

    assert hidden.dtype == torch.float32
    rows = pool(hidden, ragged.spans, "last")[restore].numpy()
    reference = Qwen3Reference(folder, causal=causal)
    np.testing.assert_allclose(rows, np.stack([reference.embed(s) for s in SEQUENCES]), rtol=0, atol=1e-5)


def test_a_language_models_head_is_not_read(tmp_path: Path) -> None:
    config = qwen3_config(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    tensors = {f"model.{name}": tensor for name, tensor in qwen3_tensors(config).items()}
    tensors["lm_head.weight"] = torch.full((64, 32), torch.nan)
    folder = write_qwen3(tmp_path / "model", config=config, tensors=tensors)

    rows = embed(make_engine(folder), SEQUENCES)

    np.testing.assert_array_equal(rows, embed(make_engine(write_qwen3(tmp_path / "bare")), SEQUENCES))


def test_pplx_embed_tells_its_encodings_and_does_not_normalise(tmp_path: Path) -> None:
    facts = make_engine(write_pplx(tmp_path)).hello()

    assert facts.encodings == ["float32", "int8", "binary"]
    assert (facts.pooling, facts.normalize, facts.architecture) == ("mean", False, "PPLXQwen3Model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type: 'qwen2' is not this architecture's"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"hidden_act": None}, "hidden_act: None is not supported"),
        ({"attention_bias": "yes"}, "attention_bias: true or false"),
        ({"use_sliding_window": True, "sliding_window": 8}, "max_window_layers: a whole number is needed"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window: a positive"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: a list of 3 is needed"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "layer_types: full_attention and sliding"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types: 'sliding_attention' needs use_sliding_window",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"head_dim": None}, "head_dim: missing"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"rms_norm_eps": None}, "rms_norm_eps: a number between 0 and 1"),
        ({"rope_theta": None}, "rope_theta: missing, and not in rope_parameters"),
        ({"rope_theta": "large"}, "rope_theta: a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta: a positive number"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type: 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.factor: missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: heads that are rotated in part"),
        ({"rope_theta": 10**400}, "rope_theta: a positive number is needed"),
        ({"num_key_value_heads": None}, "num_key_value_heads: missing"),
        ({"head_dim": 10**30}, "head_dim: 10+ is more than any model has"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention: not understood",
        ),
        ({"rope_parameters": [1e4]}, "rope_parameters: a map is needed"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta, rope_parameters.rope_theta: they disagree"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: not a field of this"),
        ({"is_causal": "no"}, "is_causal: true or false"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "architectures: Qwen3ForTokenClassification is not"),
        ({"auto_map": {"AutoModel": "modeling.Qwen3Model"}}, "auto_map: .* never run"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_qwen3(tmp_path, config=qwen3_config(**changes), tensors=qwen3_tensors(qwen3_config()))

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type: 'qwen3' is not this architecture's"),
        ({"attention_bias": True}, "attention_bias: not supported of a PPLXQwen3Model"),
        ({"use_sliding_window": True}, "use_sliding_window: not supported of a PPLXQwen3Model"),
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention: false, but"),
        ({"is_causal": True}, "is_causal: true, but"),
        (
            {"auto_map": {"AutoModel": "modeling.PPLXQwen3OtherModel"}},
            "auto_map: 'modeling.PPLXQwen3Other.*' is",
        ),
        ({"auto_map": {"AutoModel": ["modeling.PPLXQwen3Model"]}}, r"auto_map: \['modeling.PPLXQwen3Model'\] is code"),
        ({"auto_map": "modeling.PPLXQwen3Model"}, "auto_map: a map to class names"),
    ],
)
def test_a_pplx_embed_of_another_kind_stops_the_start(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    folder = write_pplx(tmp_path, config=pplx_config(**changes))

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


@pytest.mark.parametrize("auto_map", [None, {"AutoModel": "perplexity-ai/pplx-embed-v1-0.6b--modeling.PPLXQwen3Model"}])
def test_pplx_embeds_own_code_may_be_absent_or_in_another_repository(
    tmp_path: Path, auto_map: dict[str, str] | None
) -> None:
    folder = write_pplx(tmp_path, config=pplx_config(auto_map=auto_map))

    assert make_engine(folder).hello().architecture == "PPLXQwen3Model"


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path)
    for name in ("modeling.py", "configuration.py", "st_quantize.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    make_engine(folder)

    assert not (tmp_path / "ran").exists()


def test_a_quantising_module_behind_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path)
    write_bert(tmp_path / "bert")
    (tmp_path / "bert" / "modules.json").write_text((folder / "modules.json").read_text())

    with pytest.raises(ModelError, match=r"modules\.json: type: FlexibleQuantizer is not known of a BertModel"):
        make_engine(tmp_path / "bert")


def write_context(folder: Path, settings: dict[str, object], separator: str) -> Path:
    """A pplx-embed-context whose tokenizer has this token, which no text makes of its own."""
    write_pplx(folder, config=pplx_config(auto_map=CONTEXT_CODE))
    own = tokenizer(num_words=60)
    own.add_special_tokens([separator])
    own.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)
    return folder


CONTEXT_CODE = {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3ContextualModel"}


@pytest.mark.parametrize("with_modules", [True, False])
@pytest.mark.parametrize(
    ("settings", "separator", "separator_id"),
    [({"sep_token": "[SEP]"}, "[SEP]", 2), ({"sep_token": {"content": "[UNUSED]"}}, "[UNUSED]", 63)],
)
def test_a_context_model_tells_its_separator_and_quantises(
    tmp_path: Path, settings: dict[str, object], separator: str, separator_id: int, with_modules: bool
) -> None:
    folder = write_context(tmp_path, settings, separator)
    if not with_modules:
        (folder / "modules.json").unlink()

    facts = make_engine(folder).hello()

    assert facts.separator_id == separator_id
    assert (facts.pooling, facts.normalize, facts.encodings) == ("mean", False, ["float32", "int8", "binary"])


def test_a_context_model_whose_separator_is_no_token_is_refused(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path, config=pplx_config(auto_map=CONTEXT_CODE))

    with pytest.raises(ModelError, match=r"tokenizer_config\.json: sep_token: '<\|endoftext\|>' is no token of"):
        make_engine(folder)


def test_a_separator_that_is_a_word_like_any_other_is_refused(tmp_path: Path) -> None:
    folder = write_context(tmp_path, {"sep_token": "w4"}, "[SEP]")

    with pytest.raises(ModelError, match=r"tokenizer\.json: the separator 7 is none of its added tokens") as refusal:
        make_engine(folder)

    assert Inspection.of("context", folder).problems == [str(refusal.value)]


def test_chunks_are_pooled_on_their_own_and_see_each_other(tmp_path: Path) -> None:
    engine = make_engine(write_context(tmp_path, {"sep_token": "[SEP]"}, "[SEP]"))
    chunks = [[10, 11, 12], [20], [30, 31]]
    joined = [*chunks[0], 2, *chunks[1], 2, *chunks[2]]
    tokens = embed(engine, [joined], spans=[[(i, i + 1) for i in range(len(joined))]])

    rows = embed(engine, [joined], spans=[[(0, 3), (4, 5), (6, 8)]])

    expected = [tokens[0:3].mean(0), tokens[4:5].mean(0), tokens[6:8].mean(0)]
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
    assert np.abs(rows[1] - embed(engine, [chunks[1]])[0]).max() > 0.01
