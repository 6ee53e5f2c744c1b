"""What each family's own file does not compare with transformers: checkpoints of the language models as transformers
saves them, other padding tokens, models whose own code is not run, each field of config.json on its own.

The faults that these tests are for: a flag that is read and forgotten (attention that stays causal), a window one key
too narrow, positions that begin elsewhere, fields of which the default is taken for the truth.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import transformers
from transformers import AutoModel, PreTrainedModel

from tests import parity
from tests.models import edit_json, random_sequences, write_bert
from tests.parity import VOCAB_SIZE, Rows
from tests.worker.conftest import make_engine
from tests.worker.test_decoders import BIDIRECTIONAL_LLAMA, LAYER_TYPES, WINDOWS, llama, mistral, qwen2, qwen3
from tests.worker.test_gemma3 import gemma3
from tests.worker.test_gte import gte
from tests.worker.test_modernbert import GLOBAL, LOCAL, modernbert, ropes
from tests.worker.test_mpnet import mpnet
from tests.worker.test_nomic_bert import nomic_bert
from tests.worker.test_parity import bert, distilbert, roberta, xlm_roberta
from worker.checkpoint.architectures import check_dtype
from worker.checkpoint.files import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 160

ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LIMIT,
}
ROBERTA = ENCODER | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1, "pad_token_id": 1}
DISTILBERT = {"vocab_size": VOCAB_SIZE, "dim": 32, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}

PPLX: dict[str, object] = {
    "architectures": ["PPLXQwen3Model"],
    "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
    "is_causal": None,
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
}


def camembert(**changes: object) -> PreTrainedModel:
    return transformers.CamembertModel(transformers.CamembertConfig(**ROBERTA | changes))


def one_sequence() -> list[list[int]]:
    """Without any token that pads in one of the models."""
    return [[8 + token for token in random_sequences([60], seed=4, vocab_size=VOCAB_SIZE - 8)[0]]]


# --- all lengths ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(bert(hidden_act="silu"), id="bert-silu"),
        pytest.param(bert(num_attention_heads=2), id="bert-two-heads"),
        pytest.param(roberta(type_vocab_size=2), id="roberta-two-types"),
        pytest.param(roberta(pad_token_id=0, max_position_embeddings=LIMIT + 1), id="roberta-pads-by-0"),
        pytest.param(roberta(hidden_act="gelu_new"), id="roberta-gelu_new"),
        pytest.param(xlm_roberta(num_attention_heads=2), id="xlm-roberta-two-heads"),
        pytest.param(camembert(), id="camembert"),
        pytest.param(camembert(hidden_act="relu", layer_norm_eps=0.3), id="camembert-relu-epsilon"),
        pytest.param(distilbert(sinusoidal_pos_embds=True), id="distilbert-sinusoidal"),
        pytest.param(distilbert(n_heads=2), id="distilbert-two-heads"),
    ],
)
def test_the_vectors_are_those_of_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    parity.check(model, tmp_path, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("BertForMaskedLM", ENCODER),
        ("BertForPreTraining", ENCODER),
        ("RobertaForMaskedLM", ROBERTA),
        ("XLMRobertaForMaskedLM", ROBERTA),
        ("CamembertForMaskedLM", ROBERTA),
        ("DistilBertForMaskedLM", DISTILBERT | {"max_position_embeddings": LIMIT}),
    ],
)
def test_a_language_model_gives_the_vectors_of_its_encoder(
    family: str, fields: dict[str, object], tmp_path: Path
) -> None:
    config = getattr(transformers, f"{family.partition('For')[0]}Config")
    model = parity.seeded(getattr(transformers, family)(config(**fields)))
    engine = make_engine(parity.save(model, tmp_path))
    ids = parity.sequences(LIMIT)

    assert (engine.hello().architecture, engine.hello().max_tokens) == (family, LIMIT)
    parity.check_rows(engine, ids, parity.reference_rows(model.base_model, ids))


@pytest.mark.slow
def test_pplx_embed_is_a_qwen3_that_sees_every_token(tmp_path: Path) -> None:
    engine = parity.check(qwen3(is_causal=False), tmp_path / "pplx", LIMIT, **PPLX)
    causal = parity.save(parity.seeded(qwen3()), tmp_path / "causal")

    assert engine.hello().architecture == "PPLXQwen3Model"
    both_ways, one_way = (parity.rows_of(folder, one_sequence()) for folder in (tmp_path / "pplx", causal))
    assert np.abs(both_ways - one_way).max() > 0.1


@pytest.mark.slow
def test_a_llama_with_bidirectional_code_sees_every_token_of_a_long_text(tmp_path: Path) -> None:
    parity.check(llama(is_causal=False), tmp_path, LIMIT, **BIDIRECTIONAL_LLAMA)


# --- each field ---


def linear(theta: float = 10000.0) -> dict[str, object]:
    return {"rope_type": "linear", "factor": 4.0, "rope_theta": theta}


# Of fields that leave the shapes of all tensors as they are. Fewer and wider heads do so, too.
OF_DECODERS: list[dict[str, object]] = [
    {"is_causal": False},
    {"rms_norm_eps": 0.01},
    {"hidden_act": "relu"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    {"rope_parameters": linear()},
]
WIDER_HEADS: dict[str, object] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
OF_ENCODERS: list[dict[str, object]] = [
    {"hidden_act": "relu"},
    {"hidden_act": "silu"},
    {"layer_norm_eps": 0.3},
    {"num_attention_heads": 2},
]
THETA_AND_SCALING: list[dict[str, object]] = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
    {"rope_parameters": linear(500.0)},
]

FLIPS: dict[str, tuple[Callable[[], PreTrainedModel], list[dict[str, object]]]] = {
    "bert": (bert, OF_ENCODERS),
    "roberta": (roberta, [*OF_ENCODERS, {"pad_token_id": 4}]),
    "xlm-roberta": (xlm_roberta, [*OF_ENCODERS, {"pad_token_id": 0}]),
    "camembert": (camembert, [*OF_ENCODERS, {"pad_token_id": 4}]),
    "distilbert": (distilbert, [{"activation": "relu"}, {"n_heads": 2}]),
    "mpnet": (mpnet, OF_ENCODERS[:-1]),  # the table of biases has a column a head
    "nomic-bert": (
        nomic_bert,
        [
            {"hidden_act": "gelu"},
            {"layer_norm_eps": 0.3},
            {"num_attention_heads": 2, "head_dim": 16},
            *THETA_AND_SCALING,
        ],
    ),
    "gte": (gte, [*OF_ENCODERS, *THETA_AND_SCALING]),
    "modernbert": (
        modernbert,
        [
            {"num_attention_heads": 2},
            {"hidden_activation": "relu"},
            {"norm_eps": 0.3},
            {"local_attention": 10},
            {"layer_types": [LOCAL, GLOBAL, LOCAL] * 2},
            {"rope_parameters": ropes(global_theta=700.0)},
            {"rope_parameters": ropes(local_theta=700.0)},
            {"rope_parameters": ropes() | {GLOBAL: linear(5000.0)}},
            {"rope_parameters": ropes() | {LOCAL: linear(100.0)}},
        ],
    ),
    "gemma3": (
        gemma3,
        [
            {"use_bidirectional_attention": False, "sliding_window": 8},
            {"hidden_activation": "silu"},
            {"query_pre_attn_scalar": 40},
            {"rms_norm_eps": 0.3},
            {"layer_types": [GLOBAL, LOCAL, LOCAL] * 2},
            {"rope_parameters": ropes(global_theta=700.0)},
            {"rope_parameters": ropes(local_theta=700.0)},
            {"rope_parameters": ropes() | {GLOBAL: linear(5000.0)}},
        ],
    ),
    "qwen3": (qwen3, OF_DECODERS),
    "qwen3-windows": (
        lambda: qwen3(**WINDOWS),
        [
            {"sliding_window": 9},
            {"use_sliding_window": False, "layer_types": None},
            {"max_window_layers": 2, "layer_types": None},
            {"layer_types": LAYER_TYPES},
            {"is_causal": False},
        ],
    ),
    "qwen2": (qwen2, [*OF_DECODERS, WIDER_HEADS]),
    "qwen2-windows": (
        lambda: qwen2(**WINDOWS),
        [
            {"sliding_window": 9},
            {"use_sliding_window": False, "layer_types": None},
            {"max_window_layers": 2, "layer_types": None},
            {"layer_types": LAYER_TYPES},
        ],
    ),
    "mistral": (mistral, [*OF_DECODERS, WIDER_HEADS, {"sliding_window": 8}]),
    "mistral-window": (lambda: mistral(sliding_window=8), [{"sliding_window": 9}, {"is_causal": False}]),
    "llama": (llama, [*OF_DECODERS, WIDER_HEADS]),
}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param(family, change, id=f"{family}-{'-'.join(change)}-{index}")
        for family, (_, changes) in FLIPS.items()
        for index, change in enumerate(changes)
    ],
)
def test_a_field_of_config_json_alone_changes_the_vectors_as_it_does_in_transformers(
    family: str, change: dict[str, object], tmp_path: Path
) -> None:
    folder = parity.save(parity.seeded(FLIPS[family][0]()), tmp_path)
    ids = one_sequence()
    before = parity.rows_of(folder, ids)

    edit_json(folder / "config.json", **change)

    after = parity.rows_of(folder, ids)
    np.testing.assert_allclose(after, library_rows(folder, ids), rtol=0, atol=1e-5)
    assert np.abs(after - before).max() > 1e-3


def library_rows(folder: Path, ids: list[list[int]]) -> Rows:
    """What transformers makes of the same folder."""
    return parity.reference_rows(AutoModel.from_pretrained(folder).eval(), ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flag", "tensor"),
    [
        pytest.param(qwen3, "attention_bias", r"self_attn\.o_proj\.bias", id="qwen3"),
        pytest.param(llama, "attention_bias", r"self_attn\.o_proj\.bias", id="llama"),
        pytest.param(llama, "mlp_bias", r"mlp\.down_proj\.bias", id="llama-mlp"),
        pytest.param(gemma3, "attention_bias", r"self_attn\.o_proj\.bias", id="gemma3"),
        pytest.param(modernbert, "attention_bias", r"attn\.Wo\.bias", id="modernbert"),
        pytest.param(modernbert, "mlp_bias", r"mlp\.Wi\.bias", id="modernbert-mlp"),
        pytest.param(modernbert, "norm_bias", r"embeddings\.norm\.bias", id="modernbert-norm"),
    ],
)
def test_biases_that_config_json_and_the_weights_do_not_agree_on_are_neither_left_random_nor_left_out(
    model: Callable[..., PreTrainedModel], flag: str, tensor: str, tmp_path: Path
) -> None:
    without = parity.save(model(), tmp_path / "without", **{flag: True})
    within = parity.save(model(**{flag: True}), tmp_path / "within", **{flag: False})

    with pytest.raises(ModelError, match=rf"Missing tensors: .*{tensor}.*Unexpected tensors: none"):
        make_engine(without)
    with pytest.raises(ModelError, match=rf"Missing tensors: none.*Unexpected tensors: .*{tensor}"):
        make_engine(within)


# --- what is not a family here, and what is said ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["JinaBertForMaskedLM"], "auto_map": {"AutoModel": "modeling_bert.JinaBertModel"}},
            "auto_map: this model brings its own code",
        ),
        ({"architectures": ["JinaBertModel"]}, "architectures: JinaBertModel is not supported"),
        # transformers' BertModel has no such positions, and would run without any.
        ({"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not supported"),
    ],
)
def test_biases_by_distance_that_no_family_has_are_not_taken_for_a_plain_bert(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    edit_json(write_bert(tmp_path) / "config.json", **changes)

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"]
)
def test_a_gemma3_is_refused_in_float16_with_what_to_use(architecture: str) -> None:
    with pytest.raises(
        ModelError, match=rf"--dtype float16: a {architecture} overflows in it; use bfloat16 or float32"
    ):
        check_dtype(architecture, "float16")

    check_dtype(architecture, "bfloat16")
    check_dtype("Qwen3Model", "float16")


@pytest.mark.slow
@pytest.mark.parametrize("declared", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_that_config_json_declares_changes_nothing(field: str, declared: str, tmp_path: Path) -> None:
    folder = parity.save(parity.seeded(qwen3()), tmp_path)
    ids = one_sequence()
    before = parity.rows_of(folder, ids)

    edit_json(folder / "config.json", **{"dtype": None, field: declared})

    assert make_engine(folder).hello().dtype == "float32"
    np.testing.assert_array_equal(parity.rows_of(folder, ids), before)


def test_tensors_that_are_known_and_not_needed_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = parity.save(bert(), tmp_path)

    with caplog.at_level(logging.INFO):
        make_engine(folder)

    assert "2 tensors of the checkpoint are not needed: pooler.dense.bias, pooler.dense.weight" in caplog.text
