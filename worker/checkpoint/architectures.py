"""Which architectures are served, and the file that has each.

The names are those that checkpoints give in config.json under `architectures`. Another name stops the start, even if it
looks alike: a family's variants differ in ways that only their code shows.

Some checkpoints bring code of their own. It is never run; where a family here computes what that code does, the names
of its classes are listed, and a folder that names others is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from worker.checkpoint.files import ModelError

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile

# Architecture → module. By name, so that what is supported can be asked without torch.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "BertModel": "bert",
        "BertForMaskedLM": "bert",  # the same encoder; its language-model head is not used
        "BertForPreTraining": "bert",
        "RobertaModel": "roberta",
        "RobertaForMaskedLM": "roberta",
        "XLMRobertaModel": "roberta",
        "XLMRobertaForMaskedLM": "roberta",
        "CamembertModel": "roberta",
        "CamembertForMaskedLM": "roberta",
        "DistilBertModel": "distilbert",
        "DistilBertForMaskedLM": "distilbert",
        "MPNetModel": "mpnet",
        "MPNetForMaskedLM": "mpnet",
        "NomicBertModel": "nomic_bert",
        "NomicBertForMaskedLM": "nomic_bert",
        "NomicBertForPreTraining": "nomic_bert",  # what the model's own code calls the same
        "NewModel": "gte",
        "NewForMaskedLM": "gte",
        "NewForTokenClassification": "gte",  # gte-multilingual-base; its classifier is not used
        "GteModel": "gte",  # transformers' name, and that of Snowflake's copy of the code
        "GteForMaskedLM": "gte",
        "ModernBertModel": "modernbert",
        "ModernBertForMaskedLM": "modernbert",
        "GemmaModel": "gemma",
        "GemmaForCausalLM": "gemma",  # bge-reranker-v2-gemma
        "Gemma3TextModel": "gemma3",  # EmbeddingGemma
        "Gemma3ForCausalLM": "gemma3",
        "Qwen3Model": "qwen3",
        "Qwen3ForCausalLM": "qwen3",  # the same stack; its language-model head is not used
        "PPLXQwen3Model": "qwen3",  # pplx-embed v1: the same stack, every token visible
        "Qwen2Model": "qwen2",
        "Qwen2ForCausalLM": "qwen2",
        "MistralModel": "mistral",
        "MistralForCausalLM": "mistral",
        "LlamaModel": "llama",
        "LlamaForCausalLM": "llama",
        "LlamaBidirectionalModel": "llama",  # the same stack, every token visible
        # Each the body of its family and a head, which `worker.heads` has.
        "BertForSequenceClassification": "bert",
        "RobertaForSequenceClassification": "roberta",
        "XLMRobertaForSequenceClassification": "roberta",
        "CamembertForSequenceClassification": "roberta",
        "DistilBertForSequenceClassification": "distilbert",
        "MPNetForSequenceClassification": "mpnet",
        "NomicBertForSequenceClassification": "nomic_bert",
        "NewForSequenceClassification": "gte",
        "GteForSequenceClassification": "gte",
        "ModernBertForSequenceClassification": "modernbert",
        "Gemma3TextForSequenceClassification": "gemma3",
        "Qwen3ForSequenceClassification": "qwen3",
        "Qwen2ForSequenceClassification": "qwen2",
        "MistralForSequenceClassification": "mistral",
        "LlamaForSequenceClassification": "llama",
    }
)


# What a family's config.json calls the width of its hidden states, where that is not `hidden_size`, or not always.
_HIDDEN_SIZE_FIELDS: Mapping[str, str] = MappingProxyType({"distilbert": "dim", "nomic_bert": "n_embd"})


# Activations of Gemma are larger than float16 can hold.
_UNSUPPORTED_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType({"gemma": ("float16",), "gemma3": ("float16",)})


# pplx-embed v1, and what pplx-embed-context v1 has besides: the same stack, and its own way with chunks.
_PPLX, _PPLX_CONTEXT = "PPLXQwen3Model", "PPLXQwen3ContextualModel"


_NOMIC_BERT_CODE = frozenset(
    {
        "NomicBertConfig",
        "NomicBertForMultipleChoice",
        "NomicBertForPreTraining",
        "NomicBertForQuestionAnswering",
        "NomicBertForSequenceClassification",
        "NomicBertForTokenClassification",
        "NomicBertModel",
    }
)


_NEW_CODE = frozenset(
    {
        "NewConfig",
        "NewForMaskedLM",
        "NewForMultipleChoice",
        "NewForQuestionAnswering",
        "NewForSequenceClassification",
        "NewForTokenClassification",
        "NewModel",
    }
)


# Architectures whose checkpoints bring code of their own, and the classes of that code which a family here stands for.
_REPLACED_CODE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "GteModel": frozenset({"GteConfig", "GteModel"}),  # Snowflake's copy of the code of NewModel
        "NewForMaskedLM": _NEW_CODE,
        "NewForSequenceClassification": _NEW_CODE,
        "NewForTokenClassification": _NEW_CODE,
        "NewModel": _NEW_CODE,
        "NomicBertForPreTraining": _NOMIC_BERT_CODE,
        "NomicBertModel": _NOMIC_BERT_CODE,
        _PPLX: frozenset({"PPLXQwen3Config", _PPLX, _PPLX_CONTEXT}),
        "Qwen2Model": frozenset({"Qwen2Model", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"}),  # gte-Qwen2
        "Qwen2ForCausalLM": frozenset({"Qwen2Model", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"}),
        "LlamaBidirectionalModel": frozenset(
            {
                "LlamaBidirectionalConfig",
                "LlamaBidirectionalForSequenceClassification",
                "LlamaBidirectionalModel",
            }
        ),
    }
)


def check_architecture(architecture: str, config: JsonFile) -> None:
    """Raises ModelError: no family has this architecture."""
    if architecture not in FAMILIES:
        config.refuse("architectures", f"{architecture} is not supported; supported are {', '.join(FAMILIES)}.")


def read_hidden_size(architecture: str, config: JsonFile) -> int:
    """Columns of the hidden states.

    Raises:
        ModelError: no family has this architecture, or the field is missing or no positive integer.
    """
    check_architecture(architecture, config)
    field = _HIDDEN_SIZE_FIELDS.get(FAMILIES[architecture], "hidden_size")
    if config.values.get(field) is None and config.values.get("hidden_size") is not None:
        field = "hidden_size"
    return config.integer(field)


def check_own_code(architecture: str, config: JsonFile) -> None:
    """Raises ModelError: config.json names code of the folder's own that no family here stands for."""
    auto_map = config.values.get("auto_map")
    if not auto_map:
        return
    if architecture not in _REPLACED_CODE:
        config.refuse("auto_map", "this model brings its own code, which is never run.")
    if not isinstance(auto_map, dict):
        config.refuse("auto_map", f"a map to class names is needed, not {auto_map!r}.")
    for reference in auto_map.values():
        # "modeling.PPLXQwen3Model", with the repository before it if the file is in another one.
        if not isinstance(reference, str) or reference.rpartition(".")[2] not in _REPLACED_CODE[architecture]:
            config.refuse("auto_map", f"{reference!r} is code of the model's own that is not known, and never run.")


def check_dtype(architecture: str, dtype_name: str) -> None:
    """Raises ModelError: this family does not run in this dtype."""
    if dtype_name in _UNSUPPORTED_DTYPES.get(FAMILIES[architecture], ()):
        raise ModelError(f"--dtype {dtype_name}: a {architecture} overflows in it; use bfloat16 or float32.")


def is_pplx(architecture: str) -> bool:
    """Whether this is a pplx-embed, whose own code quantises."""
    return architecture == _PPLX


def makes_chunks(config: JsonFile) -> bool:
    """Whether config.json names the code of pplx-embed-context: it embeds the chunks of a document as one sequence."""
    auto_map = config.values.get("auto_map")
    return isinstance(auto_map, dict) and any(str(name).endswith(f".{_PPLX_CONTEXT}") for name in auto_map.values())
