"""The table of architectures: which are served, and everything that is known of each.

A row's name is what checkpoints give in config.json under `architectures`. Another name stops the start, even if it
looks alike: a family's variants differ in ways that only their code shows. A few checkpoints give the name of a class
that they are not, and the one that they are in `auto_map` (`declared_as`).

Some checkpoints bring code of their own. It is never run. Where a family here computes what that code does, the row
lists the names of its classes, and a folder that names others is refused.

To add a family, write a module in `worker.models.families` and its rows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from worker.checkpoint.files import ModelError

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile

# What a checkpoint's class is beside its body: nothing that counts, or a language model of this kind.
Kind: TypeAlias = Literal["body", "masked_lm", "causal_lm"]

# The heads that `worker.models.heads` and `worker.models.sparse` build.
ScoreHead: TypeAlias = Literal["pooler", "roberta", "distilbert", "modernbert", "last_token"]
VocabularyHead: TypeAlias = Literal["bert", "roberta", "distilbert"]


@dataclass(frozen=True, slots=True)
class Template:
    """A language model that scores pairs in a template of its own, and the words that it answers by."""

    model: str
    pair_template: str
    yes: str
    no: str | None  # None: the score is the logit of `yes` alone


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is known of one architecture without its checkpoint."""

    name: str
    _: KW_ONLY
    family: str  # a module of `worker.models.families`: by name, so that the table is read without torch
    kind: Kind = "body"
    examples: tuple[str, ...] = ()  # well-known models
    hidden_size_fields: tuple[str, ...] = ("hidden_size",)  # of config.json; the first one that is there counts
    score_head: ScoreHead | None = None  # a classifier's
    vocabulary_head: VocabularyHead | None = None  # None: no sparse rows
    template: Template | None = None
    declared_as: str | None = None  # what `architectures` says instead of the row's name, which only `auto_map` gives
    own_code: frozenset[str] = frozenset()  # classes of a checkpoint's own code that the family stands for
    chunking_code: str | None = None  # one of them, which embeds the chunks of a document as one sequence
    overflowing_dtypes: tuple[str, ...] = ()
    is_bidirectional: bool = False  # a decoder in which every token is seen, whatever config.json says
    is_tied: bool = False  # whether the language-model head is the embedding table where config.json does not say
    quantizes: bool = False  # whether its own code makes int8 and bits of rows
    types_tokens: bool = False  # whether its usual tokenizer tells a pair's second text from its first


# --- families, as far as their rows agree ---

_bert = partial(Architecture, family="bert", types_tokens=True)
_roberta = partial(Architecture, family="roberta")
_distilbert = partial(Architecture, family="distilbert", hidden_size_fields=("dim", "hidden_size"))
_mpnet = partial(Architecture, family="mpnet")
_nomic = partial(Architecture, family="nomic_bert", hidden_size_fields=("n_embd", "hidden_size"), types_tokens=True)
_gte = partial(Architecture, family="gte")
_modernbert = partial(Architecture, family="modernbert")
_gemma = partial(Architecture, family="gemma", overflowing_dtypes=("float16",), is_tied=True)
_gemma3 = partial(Architecture, family="gemma3", overflowing_dtypes=("float16",), is_tied=True)
_qwen3 = partial(Architecture, family="qwen3")
_voyage = partial(Architecture, family="voyage", hidden_size_fields=("num_labels",), is_bidirectional=True)
_qwen2 = partial(Architecture, family="qwen2")
_mistral = partial(Architecture, family="mistral")
_llama = partial(Architecture, family="llama")

_TASKS = ("ForMultipleChoice", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")
_NOMIC_CODE = frozenset(f"NomicBert{part}" for part in ("Config", "Model", "ForPreTraining", *_TASKS))
_NEW_CODE = frozenset(f"New{part}" for part in ("Config", "Model", "ForMaskedLM", *_TASKS))
_GTE_QWEN2_CODE = frozenset({"Qwen2Model", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"})
_PPLX_CODE = frozenset({"PPLXQwen3Config", "PPLXQwen3Model", "PPLXQwen3ContextualModel"})
_LLAMA_CODE = frozenset(f"LlamaBidirectional{part}" for part in ("Config", "ForSequenceClassification", "Model"))

_QWEN3_RERANKER = Template("Qwen3-Reranker", "qwen3-reranker", "yes", "no")
_BGE_GEMMA = Template("bge-reranker-v2-gemma", "bge-reranker-v2-gemma", "Yes", None)


# --- the table ---

_ROWS = (
    _bert("BertModel", examples=("all-MiniLM-L6-v2", "bge-small-en-v1.5", "e5-base-v2", "gte-base")),
    _bert("BertForMaskedLM", kind="masked_lm", vocabulary_head="bert", examples=("splade-cocondenser",)),
    _bert("BertForPreTraining", vocabulary_head="bert"),
    _roberta("RobertaModel"),
    _roberta("RobertaForMaskedLM", kind="masked_lm", vocabulary_head="roberta", examples=("all-distilroberta-v1",)),
    _roberta("XLMRobertaModel", examples=("multilingual-e5-base", "bge-m3")),
    _roberta("XLMRobertaForMaskedLM", kind="masked_lm", vocabulary_head="roberta"),
    _roberta("CamembertModel"),
    _roberta("CamembertForMaskedLM", kind="masked_lm", vocabulary_head="roberta"),
    _distilbert("DistilBertModel", examples=("msmarco-distilbert-base-tas-b",)),
    _distilbert("DistilBertForMaskedLM", kind="masked_lm", vocabulary_head="distilbert"),
    _mpnet("MPNetModel", examples=("paraphrase-mpnet-base-v2",)),
    _mpnet("MPNetForMaskedLM", kind="masked_lm", vocabulary_head="roberta", examples=("all-mpnet-base-v2",)),
    _nomic("NomicBertModel", own_code=_NOMIC_CODE, examples=("nomic-embed-text-v1.5",)),
    _nomic("NomicBertForMaskedLM", kind="masked_lm"),
    _nomic("NomicBertForPreTraining", own_code=_NOMIC_CODE),  # what the model's own code calls the same
    _gte("NewModel", own_code=_NEW_CODE, examples=("gte-base-en-v1.5",)),
    _gte("NewForMaskedLM", kind="masked_lm", own_code=_NEW_CODE),
    _gte("NewForTokenClassification", own_code=_NEW_CODE, examples=("gte-multilingual-base",)),
    # transformers' name, and that of Snowflake's copy of the code of NewModel.
    _gte("GteModel", own_code=frozenset({"GteConfig", "GteModel"}), examples=("snowflake-arctic-embed-m-v2.0",)),
    _gte("GteForMaskedLM", kind="masked_lm"),
    _modernbert("ModernBertModel", examples=("gte-modernbert-base", "modernbert-embed-base")),
    _modernbert("ModernBertForMaskedLM", kind="masked_lm"),
    _qwen3("Qwen3Model"),
    _qwen3(
        "Qwen3ForCausalLM",
        kind="causal_lm",
        template=_QWEN3_RERANKER,
        examples=("Qwen3-Embedding-0.6B", "Qwen3-Reranker-0.6B"),
    ),
    _qwen3(
        "PPLXQwen3Model",
        own_code=_PPLX_CODE,
        chunking_code="PPLXQwen3ContextualModel",
        is_bidirectional=True,
        quantizes=True,
        examples=("pplx-embed-v1-0.6b", "pplx-embed-context-v1-0.6b"),
    ),
    _voyage(
        "Qwen3BidirectionalModel",
        declared_as="Qwen3ForCausalLM",
        own_code=frozenset({"Qwen3BidirectionalModel"}),
        examples=("voyage-4-nano",),
    ),
    _qwen2("Qwen2Model", own_code=_GTE_QWEN2_CODE),
    _qwen2("Qwen2ForCausalLM", kind="causal_lm", own_code=_GTE_QWEN2_CODE, examples=("jina-code-embeddings-0.5b",)),
    _mistral("MistralModel", examples=("e5-mistral-7b-instruct", "SFR-Embedding-Mistral")),
    _mistral("MistralForCausalLM", kind="causal_lm"),
    _llama("LlamaModel"),
    _llama("LlamaForCausalLM", kind="causal_lm"),
    _llama(
        "LlamaBidirectionalModel", own_code=_LLAMA_CODE, is_bidirectional=True, examples=("llama-embed-nemotron-8b",)
    ),
    _gemma("GemmaModel"),
    _gemma("GemmaForCausalLM", kind="causal_lm", template=_BGE_GEMMA, examples=("bge-reranker-v2-gemma",)),
    _gemma3("Gemma3TextModel", examples=("embeddinggemma-300m",)),
    _gemma3("Gemma3ForCausalLM", kind="causal_lm"),
    _bert("BertForSequenceClassification", score_head="pooler", examples=("ms-marco-MiniLM-L6-v2",)),
    _roberta("RobertaForSequenceClassification", score_head="roberta"),
    _roberta("XLMRobertaForSequenceClassification", score_head="roberta", examples=("bge-reranker-v2-m3",)),
    _roberta("CamembertForSequenceClassification", score_head="roberta"),
    _distilbert("DistilBertForSequenceClassification", score_head="distilbert"),
    _mpnet("MPNetForSequenceClassification", score_head="roberta"),
    _nomic("NomicBertForSequenceClassification", score_head="pooler"),
    _gte(
        "NewForSequenceClassification",
        score_head="pooler",
        own_code=_NEW_CODE,
        examples=("gte-multilingual-reranker-base",),
    ),
    _gte("GteForSequenceClassification", score_head="pooler"),
    _modernbert(
        "ModernBertForSequenceClassification",
        score_head="modernbert",
        examples=("gte-reranker-modernbert-base",),
    ),
    _gemma3("Gemma3TextForSequenceClassification", score_head="last_token"),
    _qwen3("Qwen3ForSequenceClassification", score_head="last_token"),
    _qwen2("Qwen2ForSequenceClassification", score_head="last_token"),
    _mistral("MistralForSequenceClassification", score_head="last_token"),
    _llama("LlamaForSequenceClassification", score_head="last_token"),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.name: row for row in _ROWS})


# --- what is asked of a row ---


def find_architecture(name: str, config: JsonFile) -> Architecture:
    """The row of the architecture that config.json names.

    Raises:
        ModelError: there is none, or config.json names code of the folder's own that no family here stands for.
    """
    rows = {row.declared_as: row for row in ARCHITECTURES.values() if row.name in _code_classes(config)}
    row = rows.get(name) or ARCHITECTURES.get(name)
    _check_own_code(frozenset() if row is None else row.own_code, config)
    if row is None or row.declared_as not in (None, name):
        known = ", ".join(row.name for row in ARCHITECTURES.values() if row.declared_as is None)
        config.refuse("architectures", f"{name} is not supported; supported are {known}.")
    return row


def read_hidden_size(row: Architecture, config: JsonFile) -> int:
    """Columns of the hidden states.

    Raises:
        ModelError: the field is missing or no positive integer.
    """
    fields = [field for field in row.hidden_size_fields if config.values.get(field) is not None]
    return config.integer((fields or row.hidden_size_fields)[0])


def makes_chunks(row: Architecture, config: JsonFile) -> bool:
    """Whether config.json names the code that embeds the chunks of a document as one sequence."""
    return row.chunking_code is not None and row.chunking_code in _code_classes(config)


def check_dtype(name: str, dtype_name: str) -> None:
    """Raises ModelError: the architecture of this name does not run in this dtype."""
    if dtype_name in ARCHITECTURES[name].overflowing_dtypes:
        raise ModelError(f"--dtype {dtype_name}: a {name} overflows in it; use bfloat16 or float32.")


def _check_own_code(known: frozenset[str], config: JsonFile) -> None:
    auto_map = config.values.get("auto_map")
    if not auto_map:
        return
    if not known:
        config.refuse("auto_map", "this model brings its own code, which is never run.")
    if not isinstance(auto_map, dict):
        config.refuse("auto_map", f"a map to class names is needed, not {auto_map!r}.")
    for reference in auto_map.values():
        if _class_of(reference) not in known:
            config.refuse("auto_map", f"{reference!r} is code of the model's own that is not known, and never run.")


def _code_classes(config: JsonFile) -> set[str]:
    auto_map = config.values.get("auto_map")
    return {_class_of(reference) for reference in auto_map.values()} if isinstance(auto_map, dict) else set()


def _class_of(reference: object) -> str:
    """The class that a value of `auto_map` names: "modeling.PPLXQwen3Model", perhaps with a repository before it."""
    return reference.rpartition(".")[2] if isinstance(reference, str) else ""
