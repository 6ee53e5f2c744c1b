"""A tiny model for every architecture that is served, built of transformers' classes, and what its config.json may say.

What it may not say is in `tests/refusals.py`.

A class of transformers and its fields stand for most architectures. For those that are known by code of their own, the
twin is the class that computes the same, and `declared` is what their config.json says instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3Model
from transformers.modeling_outputs import BaseModelOutput

from tests import parity
from tests.parity import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 160
TRAINED = 40  # tokens, of the models whose positions are scaled to LIMIT
GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETA = 500.0  # of a GteModel

Fields = dict[str, object]


def ropes(global_theta: float = 5000.0, local_theta: float = 100.0) -> dict[str, Fields]:
    return {
        GLOBAL: {"rope_type": "default", "rope_theta": global_theta},
        LOCAL: {"rope_type": "default", "rope_theta": local_theta},
    }


def linear(theta: float = 10000.0, factor: float = 4.0) -> Fields:
    return {"rope_type": "linear", "factor": factor, "rope_theta": theta}


def plain(theta: float) -> Fields:
    return {"rope_type": "default", "rope_theta": theta}


# --- what transformers' classes are built with, by the type in their config.json ---

_COMMON: Fields = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": LIMIT,
}
_ENCODER = _COMMON | {"num_hidden_layers": 2}
_ROBERTA = _ENCODER | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1, "pad_token_id": 1}
_DECODER = _COMMON | {"num_hidden_layers": 3, "num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}

FIELDS: dict[str, Fields] = {
    "bert": _ENCODER,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": {"dim": 32, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}
    | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LIMIT},
    "mpnet": _ENCODER | {"max_position_embeddings": LIMIT + 2},
    "nomic_bert": _ENCODER,
    "gte": _ENCODER | {"rope_parameters": plain(THETA)},
    "modernbert": _COMMON
    | _SPECIAL
    | {
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "local_attention": 8,
        "layer_types": [GLOBAL, LOCAL, LOCAL] * 2,
        "rope_parameters": ropes(),
    },
    # A hidden size whose root is no number of bfloat16.
    "gemma": _DECODER | {"hidden_size": 40, "num_key_value_heads": 1, "head_dim": 16},
    "gemma3_text": _DECODER
    | {
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": [LOCAL, LOCAL, GLOBAL] * 2,
        "rope_parameters": ropes(),
        "use_bidirectional_attention": True,
    },
    "qwen3": _DECODER | {"head_dim": 16},
    "qwen2": _DECODER,
    "mistral": _DECODER | {"sliding_window": None},
    "llama": _DECODER,
}


# --- config.json of checkpoints that bring code of their own, but for the sizes ---

_NOMIC = "nomic-ai/nomic-bert-2048--"
_NEW = "Alibaba-NLP/new-impl--"
_HEADS = ("MultipleChoice", "QuestionAnswering", "SequenceClassification", "TokenClassification")

# transformers' names of what NomicBERT's own code calls otherwise: the files of the first releases have none of them.
WITHOUT_CURRENT: Fields = dict.fromkeys(
    (
        *("head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_norm_eps"),
        *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "rope_parameters"),
    )
)
NOMIC: Fields = {
    "auto_map": {
        "AutoConfig": f"{_NOMIC}configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": f"{_NOMIC}modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": f"{_NOMIC}modeling_hf_nomic_bert.NomicBertForPreTraining",
        **{f"AutoModelFor{head}": f"{_NOMIC}modeling_hf_nomic_bert.NomicBertFor{head}" for head in _HEADS},
    },
    "activation_function": "swiglu",
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 80,
    "n_layer": 2,
    "n_positions": LIMIT,
    "pad_vocab_size_multiple": 16,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    **dict.fromkeys(("causal", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "parallel_block_tied_norm"), False),
    **dict.fromkeys(("prenorm", "qkv_proj_bias", "reorder_and_upcast_attn", "rotary_emb_interleaved"), False),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "use_rms_norm"), False),
    **dict.fromkeys(("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "scale_attn_weights"), True),
    **dict.fromkeys(("use_flash_attn", "use_xentropy"), True),
}
NEW: Fields = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{_NEW}configuration.NewConfig",
        "AutoModel": f"{_NEW}modeling.NewModel",
        "AutoModelForMaskedLM": f"{_NEW}modeling.NewForMaskedLM",
        **{f"AutoModelFor{head}": f"{_NEW}modeling.NewFor{head}" for head in _HEADS},
    },
    "classifier_dropout": None,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "model_type": "new",
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": THETA,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
SNOWFLAKE: Fields = NEW | {
    "architectures": ["GteModel"],
    "auto_map": {
        "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
        "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
    },
    "matryoshka_dimensions": [256],
    "model_type": "gte",
    "unpad_inputs": "true",
    "use_memory_efficient_attention": "true",
}
PPLX: Fields = {
    "architectures": ["PPLXQwen3Model"],
    "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
    "is_causal": None,
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
}
LLAMA_CODE = {
    "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
    "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
}
BIDIRECTIONAL_LLAMA: Fields = {
    "architectures": ["LlamaBidirectionalModel"],
    "auto_map": LLAMA_CODE,
    "is_causal": None,
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 0.02,
}
QWEN2_CODE = {
    "AutoModel": "modeling_qwen.Qwen2Model",
    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
}

VOYAGE: Fields = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "id2label": None,
    "label2id": None,
    "num_labels": 48,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": True,
    "use_sliding_window": False,
}


class Voyage(PreTrainedModel):
    """What voyage-4-nano's own code computes, of transformers' classes: a mask that hides nothing, a projection."""

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.model = Qwen3Model(config)
        self.linear = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> BaseModelOutput:
        mask = torch.zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
        hidden = self.model(input_ids=input_ids, attention_mask={GLOBAL: mask}).last_hidden_state
        return BaseModelOutput(last_hidden_state=self.linear(hidden))


# --- what older releases of transformers have written ---

OLD_MODERNBERT: Fields = {
    "layer_types": None,
    "rope_parameters": None,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 5000.0,
    "local_rope_theta": 100.0,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "absolute",
}
OLD_GEMMA3: Fields = {
    "layer_types": None,
    "rope_parameters": None,
    "rope_local_base_freq": 100.0,
    "rope_scaling": None,
    "rope_theta": 5000.0,
    "sliding_window_pattern": 3,
    "cache_implementation": "hybrid",
}
OLD_QWEN3: Fields = {"layer_types": None, "rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True)
class Twin:
    """What computes as an architecture does, and how a checkpoint of that architecture says so."""

    name: str | type[PreTrainedModel]  # a class of transformers, or one from above
    fields: Fields = field(default_factory=dict)
    declared: Fields = field(default_factory=dict)


TWINS = {
    "NomicBertForPreTraining": Twin("NomicBertForMaskedLM"),
    "NewModel": Twin("GteModel", declared=NEW),
    "NewForMaskedLM": Twin("GteForMaskedLM", declared=NEW | {"architectures": ["NewForMaskedLM"]}),
    "NewForTokenClassification": Twin(
        "GteForTokenClassification", declared=NEW | {"architectures": ["NewForTokenClassification"]}
    ),
    "PPLXQwen3Model": Twin("Qwen3Model", {"is_causal": False}, PPLX),
    "Qwen3BidirectionalModel": Twin(Voyage, {"num_labels": 48}, VOYAGE),
    "LlamaBidirectionalModel": Twin("LlamaModel", {"is_causal": False}, BIDIRECTIONAL_LLAMA),
    # Not architectures, but files of other releases, or of code that says otherwise what the class is.
    "NomicBertModel, own": Twin("NomicBertModel", declared=NOMIC),
    "Qwen3Model, older": Twin("Qwen3Model", declared=OLD_QWEN3),
    "Qwen2Model, own": Twin("Qwen2Model", {"is_causal": False}, {"auto_map": QWEN2_CODE}),
}


def tiny(name: str, **changes: object) -> PreTrainedModel:
    """The class of transformers of this name, or the twin's, with random weights."""
    twin = TWINS.get(name, Twin(name))
    made = getattr(transformers, twin.name) if isinstance(twin.name, str) else twin.name
    model: PreTrainedModel = made(made.config_class(**FIELDS[made.config_class.model_type] | twin.fields | changes))
    return model


def declared(name: str, **changes: object) -> Fields:
    """What is to be changed in the config.json that transformers writes of `tiny`."""
    twin = TWINS.get(name, Twin(name))
    own = {} if name == twin.name or "," in name else {"architectures": [name]}
    return {**own, **twin.declared, **changes}


def save(name: str, folder: Path, **changes: object) -> Path:
    """A checkpoint of this architecture, seeded; `changes` are made in its config.json."""
    return parity.save(parity.seeded(tiny(name)), folder, **declared(name, **changes))


# --- what a family's checkpoints have: each of these gives the vectors of transformers' class of the same fields ---

WINDOWS: Fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LAYER_TYPES = [LOCAL, GLOBAL, LOCAL]

VARIANTS: dict[str, list[Fields]] = {
    "BertModel": [{"hidden_act": "gelu_new"}, {"hidden_act": "gelu_pytorch_tanh"}, {"type_vocab_size": 1}],
    "RobertaModel": [
        {"type_vocab_size": 2},
        {"hidden_act": "gelu_new"},
        {"pad_token_id": 0, "max_position_embeddings": LIMIT + 1},
        {"pad_token_id": 2, "max_position_embeddings": LIMIT + 3},
    ],
    "DistilBertModel": [{"sinusoidal_pos_embds": True}],
    "MPNetModel": [{"hidden_act": "gelu_new"}, {"num_attention_heads": 2}, {"num_hidden_layers": 3}],
    "NomicBertModel": [{"head_dim": 16}, {"type_vocab_size": 1}],
    "GteModel": [{"hidden_act": "gelu_new"}, {"type_vocab_size": 0}, {"type_vocab_size": 2}],
    "ModernBertModel": [
        {"norm_bias": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"local_attention": 6},
        {"layer_types": [LOCAL] * 6},
        {"layer_types": [GLOBAL] * 6},
    ],
    "GemmaModel": [
        {"attention_bias": True},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"head_dim": 256, "num_hidden_layers": 1},
        {"is_causal": False},
    ],
    "Gemma3TextModel": [
        {"use_bidirectional_attention": way, **changes}
        for way in (True, False)
        for changes in (
            {},
            {"attention_bias": True},
            {"num_key_value_heads": 1, "head_dim": 32},
            {"layer_types": [LOCAL] * 6},
            {"layer_types": [GLOBAL] * 6},
            {"sliding_window": 2},
            {"sliding_window": 7},
            {"hidden_activation": "gelu"},  # 2.5e-5 from the other gelu
        )
    ],
    "Qwen3Model": [
        {"is_causal": False},
        {"attention_bias": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        WINDOWS,
        WINDOWS | {"is_causal": False},
        WINDOWS | {"layer_types": LAYER_TYPES},
    ],
    "Qwen2Model": [
        {"is_causal": False},
        {"head_dim": 16},
        {"num_key_value_heads": 1},
        {"hidden_act": "gelu_new"},
        WINDOWS,
        WINDOWS | {"is_causal": False},
        WINDOWS | {"layer_types": LAYER_TYPES},
    ],
    "MistralModel": [
        {"is_causal": False},
        {"head_dim": 16},
        {"num_key_value_heads": 1},
        *({"sliding_window": window} for window in (1, 8, LIMIT - 1, 4096)),
        {"sliding_window": 8, "is_causal": False},
    ],
    "LlamaModel": [
        {"is_causal": False},
        {"head_dim": 16},
        {"num_key_value_heads": None},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "is_causal": False},
    ],
}

# Kinds of scaled positions, of models that were trained on TRAINED tokens.
SCALINGS: dict[str, Fields] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED, "beta_fast": 4.0},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": TRAINED}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}

# --- fields of which each alone changes the vectors: they leave the shapes of all tensors as they are ---

_OF_ENCODERS: list[Fields] = [
    {"hidden_act": "relu"},
    {"hidden_act": "silu"},
    {"layer_norm_eps": 0.3},
    {"num_attention_heads": 2},
]
_OF_DECODERS: list[Fields] = [
    {"is_causal": False},
    {"rms_norm_eps": 0.01},
    {"hidden_act": "relu"},
    {"hidden_act": "gelu"},
    {"rope_parameters": plain(700.0)},
    {"rope_parameters": linear()},
]
_WIDER_HEADS: Fields = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_OF_WINDOWS: list[Fields] = [
    {"sliding_window": 9},
    {"sliding_window": 7},
    {"use_sliding_window": False, "layer_types": None},
    {"max_window_layers": 2, "layer_types": None},
    {"layer_types": LAYER_TYPES},
    {"is_causal": False},
]
_OF_TWO_ROPES: list[Fields] = [
    {"rope_parameters": ropes(global_theta=700.0)},
    {"rope_parameters": ropes(local_theta=700.0)},
    {"rope_parameters": ropes() | {GLOBAL: linear(5000.0)}},
]

# Class → what it is built with beside its usual fields, and the changes.
FLIPS: list[tuple[str, Fields, list[Fields]]] = [
    ("BertModel", {}, _OF_ENCODERS),
    ("RobertaModel", {}, [*_OF_ENCODERS, {"pad_token_id": 4}]),
    ("XLMRobertaModel", {}, [*_OF_ENCODERS, {"pad_token_id": 0}]),
    ("CamembertModel", {}, [*_OF_ENCODERS, {"pad_token_id": 4}]),
    ("DistilBertModel", {}, [{"activation": "relu"}, {"n_heads": 2}]),
    ("MPNetModel", {}, _OF_ENCODERS[:-1]),  # the table of biases has a column a head
    (
        "NomicBertModel",
        {},
        [
            {"hidden_act": "gelu"},
            {"hidden_act": "relu"},
            {"layer_norm_eps": 0.3},
            {"num_attention_heads": 2, "head_dim": 16},
            {"rope_parameters": plain(20.0)},
            {"rope_parameters": linear(500.0)},
        ],
    ),
    ("GteModel", {}, [*_OF_ENCODERS, {"rope_parameters": plain(20.0)}, {"rope_parameters": linear(500.0)}]),
    (
        "ModernBertModel",
        {},
        [
            {"num_attention_heads": 2},
            {"hidden_activation": "relu"},
            {"hidden_activation": "silu"},
            {"norm_eps": 0.3},
            {"local_attention": 10},
            {"layer_types": [LOCAL, GLOBAL, LOCAL] * 2},
            *_OF_TWO_ROPES,
            {"rope_parameters": ropes() | {LOCAL: linear(100.0)}},
        ],
    ),
    (
        "GemmaModel",
        {},
        [
            {"hidden_act": "silu", "hidden_activation": "silu"},
            {"rms_norm_eps": 0.3},
            {"rope_parameters": plain(100.0)},
            {"rope_parameters": linear()},
            {"is_causal": False, "use_bidirectional_attention": True},
        ],
    ),
    *(
        (
            "Gemma3TextModel",
            {"use_bidirectional_attention": way},
            [
                {"use_bidirectional_attention": not way, "sliding_window": 8},
                {"sliding_window": 10},
                {"sliding_window": 6},
                {"hidden_activation": "silu"},
                {"query_pre_attn_scalar": 40},
                {"rms_norm_eps": 0.3},
                {"layer_types": [GLOBAL, LOCAL, LOCAL] * 2},
                *_OF_TWO_ROPES,
            ],
        )
        for way in (True, False)
    ),
    ("Qwen3Model", {}, _OF_DECODERS),
    ("Qwen3Model", WINDOWS, _OF_WINDOWS),
    ("Qwen2Model", {}, [*_OF_DECODERS, _WIDER_HEADS]),
    ("Qwen2Model", WINDOWS, _OF_WINDOWS),
    ("MistralModel", {}, [*_OF_DECODERS, _WIDER_HEADS, {"sliding_window": 8}, {"sliding_window": 32}]),
    ("MistralModel", {"sliding_window": 8}, [{"sliding_window": 9}, {"sliding_window": None}, {"is_causal": False}]),
    (
        "LlamaModel",
        {},
        [
            *_OF_DECODERS,
            _WIDER_HEADS,
            *(
                {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}
                for kind, fields in SCALINGS.items()
                if kind != "dynamic"
            ),
        ],
    ),
]

# --- what other releases write, and what does not matter: the vectors stay those of the class as it is built ---

TAKEN: dict[str, list[Fields]] = {
    "NomicBertModel": [
        {"rope_parameters": None},
        NOMIC | WITHOUT_CURRENT,
        NOMIC | {"max_position_embeddings": 64},
        NOMIC | WITHOUT_CURRENT | {"model_type": None, "auto_map": None},
    ],
    "GteModel": [
        NEW,
        NEW | {"model_type": None, "auto_map": None, "layer_norm_type": None},
        NEW | {"unpad_inputs": True, "use_memory_efficient_attention": True},
        SNOWFLAKE,
    ],
    "ModernBertModel": [
        OLD_MODERNBERT,
        OLD_MODERNBERT | {"position_embedding_type": "sans_pos", "is_causal": False},
        OLD_MODERNBERT | {"layer_types": [GLOBAL, LOCAL, LOCAL] * 2},
        OLD_MODERNBERT | {"rope_parameters": ropes(), "global_rope_theta": None},
        OLD_MODERNBERT | {"model_type": None},
        {"sparse_prediction": True, "classifier_pooling": "mean", "deterministic_flash_attn": True},
        {"reference_compile": True, "decoder_bias": False, "attention_dropout": 0.5},
    ],
    "GemmaModel": [
        {"hidden_act": "gelu", "hidden_activation": None},
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
        {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": None, "hidden_activation": None},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None},
        {"model_type": None, "is_causal": True, "use_bidirectional_attention": False},
        {"use_cache": False, "tie_word_embeddings": False, "attention_dropout": 0.5},
    ],
    "Gemma3TextModel": [
        OLD_GEMMA3,
        OLD_GEMMA3 | {"rope_scaling": {"rope_type": "default"}},
        OLD_GEMMA3 | {"layer_types": [LOCAL, LOCAL, GLOBAL] * 2, "sliding_window_pattern": None},
        OLD_GEMMA3 | {"rope_parameters": ropes(), "rope_theta": None},
        OLD_GEMMA3 | {"model_type": None, "is_causal": True},
        {"use_cache": False, "tie_word_embeddings": False, "attention_dropout": 0.5},
    ],
    "Qwen3Model": [OLD_QWEN3, {"dtype": None, "torch_dtype": "float16"}, {"dtype": "bfloat16"}],
}
