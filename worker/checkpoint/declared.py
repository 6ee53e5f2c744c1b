"""What a model's folder declares, apart from its weights: architecture, pooling, limits, prompts, tokenizer.

The folder is read as sentence-transformers reads it: `modules.json` and the files that it leads to, as releases 2 to 6
have written them. Without `modules.json` it is a bare encoder: mean pooling, no normalisation, no prompts.

Everything that could change a vector is understood, or stops the start with a `ModelError` that names the file and the
field. A warning was rejected: the server would look healthy and return numbers that no other software gives.

No code from a model is ever run. A folder that brings some (`auto_map`) is refused, unless the row of its architecture
lists that code (`architectures`). What pplx-embed's code does after pooling is known by the name of its module.

`modules` reads what follows the pooling, and `tokenizer` the tokenizer. A Normalize at the end is not a stage: it is
the default of `normalize`, which a client may override. A model that scores pairs has a head instead (`scoring`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias, cast

from common.errors import EX_CONFIG
from worker.checkpoint.architectures import Architecture, find_architecture, makes_chunks, read_hidden_size
from worker.checkpoint.files import MAX_POSITIONS, JsonFile, ModelError, sha256_of
from worker.checkpoint.modules import (
    SCORING_CLASSES,
    SPARSE_CLASSES,
    Module,
    Pipeline,
    Pooling,
    Stage,
    UnitStage,
    read_modules,
    refuse_modules,
)
from worker.checkpoint.scoring import (
    MESSAGE,
    CrossEncoderFiles,
    Scoring,
    Task,
    read_classifier,
    read_language_model,
)
from worker.checkpoint.splade import Splade, check_masked, read_bare, read_splade
from worker.checkpoint.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

# The Transformer's settings: the first file that is not empty counts.
_TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

# Options that the Transformer's file may pass on to transformers, because none changes a number: how attention is
# computed, the dtype (here --dtype says it), how a batch is padded (here it is not). The second map has their old
# names.
_HARMLESS_OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "model_kwargs": frozenset({"trust_remote_code", "attn_implementation", "dtype", "torch_dtype"}),
        "processor_kwargs": frozenset({"trust_remote_code", "padding_side"}),
        "config_kwargs": frozenset({"trust_remote_code", "use_cache"}),
    }
)
_FORMER_OPTIONS: Mapping[str, str] = MappingProxyType(
    {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
)

# What a model is for: a `Task` that the operator may name, or only rows of tokens.
_Purpose: TypeAlias = Literal["embed", "tokens", "score", "sparse"]
_PURPOSES: Mapping[_Purpose, str] = MappingProxyType(
    {"embed": "--task embed", "tokens": "rows of tokens", "score": "--task score", "sparse": "--task sparse"}
)

# Prompts that every model of sentence-transformers has, empty unless it says otherwise.
_USUAL_PROMPTS = ("query", "document")

# The largest sizes that are believed, and the fields that declare them, of all families. A larger one is a slip: it
# would cost minutes and memory before it is compared with the weights. Products of these sizes fit into 64 bits.
_LARGEST: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1_000: ("num_hidden_layers", "n_layers", "n_layer"),
        MAX_POSITIONS: ("max_position_embeddings", "n_positions", "max_trained_positions"),
        2**18: (
            *("hidden_size", "dim", "n_embd", "intermediate_size", "hidden_dim", "n_inner"),
            *("num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "head_dim"),
        ),
        2**31 - 1: ("vocab_size", "type_vocab_size"),
    }
)

# Tokenizers without a limit of their own write 1e30.
_SANE_MODEL_MAX_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, understood."""

    root: Path  # holds modules.json; folders of stages are relative to it
    folder: Path  # holds config.json, the weights and tokenizer.json; usually the root
    config: JsonFile
    config_sha256: str
    architecture: str  # a name of the table of architectures
    tasks: list[str]  # what it is for, see ModelFacts
    poolings: tuple[Pooling, ...]  # their rows stand side by side; empty if the head decides (scores, sparse rows)
    include_prompt: bool  # whether the tokens of a prompt are pooled
    stages: tuple[Stage, ...]
    dimensions: int  # columns of a row after all stages
    normalize: bool
    encodings: list[str]  # that a client may ask for, names of common.wire.rows
    lower_case: bool
    length_limit: int | None  # tokens, as the files declare; the position table may set a lower limit
    prompts: dict[str, str]
    default_prompt_name: str | None
    tokenizer_sha256: str
    separator_id: int | None  # the token between chunks, if the model embeds the chunks of a document as one sequence
    scoring: Scoring | None  # if the model scores pairs
    splade: Splade | None  # if the model makes sparse rows

    @classmethod
    def read(cls, root: Path, task: Task = "auto") -> Checkpoint:
        """Everything that the folder declares; `task` is what the operator says it is for.

        Raises:
            ModelError: a file is missing, malformed, declares something that is not supported, or is for another task.
        """
        modules = read_modules(root)
        folder = root / modules[0].folder if modules else root
        config = JsonFile.read(folder / "config.json")
        architecture = read_architecture(config)
        if (folder / "adapter_config.json").exists():
            raise ModelError(f"{folder / 'adapter_config.json'}: adapters are not supported; merge it into the model.")
        hidden_size = read_hidden_size(architecture, config)
        purpose = _choose_purpose(architecture, config, modules, task)
        if purpose == "score":
            return cls._read_scorer(root, modules, config, architecture, task)
        if purpose == "sparse":
            return cls._read_sparse(root, modules, config, architecture)
        if modules:
            settings = _SentenceSettings.read(root, _MODEL_TYPES[purpose])
            transformer = _read_transformer(folder)
            pipeline = Pipeline.read(root, modules, hidden_size, settings.truncate_dim)
        else:
            # sentence-transformers then reads neither 1_Pooling nor its two files of settings.
            logger.info("%s has no modules.json: mean pooling, no normalisation, no prompts", root)
            if config.text("pooling") not in (None, "avg", "mean"):  # llama-embed's own
                config.refuse("pooling", "without a modules.json only the mean is supported.")
            if architecture.template is not None:
                logger.info("%s: if it is a %s, --task score serves it as one", root, architecture.template.model)
            if architecture.vocabulary_head is not None:
                logger.info("%s: if it is a SPLADE, --task sparse serves it as one", root)
            settings = _SentenceSettings({}, None, None)
            transformer = JsonFile(folder / _TRANSFORMER_FILES[0], {})
            pipeline = Pipeline(("mean",), True, (), False, hidden_size)
        if pipeline.quantizes and not architecture.quantizes:
            raise ModelError(f"{root / 'modules.json'}: type: FlexibleQuantizer is not known of a {architecture.name}.")
        tokenizer = TokenizerFile.read(folder, config)
        separator_id = tokenizer.separator_id() if makes_chunks(architecture, config) else None
        # Without modules.json a context model's own code quantises what it has pooled.
        quantizes = pipeline.quantizes or (separator_id is not None and not modules)
        normalize = pipeline.stages[-1:] == (UnitStage(),)
        stages = pipeline.stages[:-1] if normalize else pipeline.stages
        # A row over one token is that token's hidden state, unless stages follow.
        has_tokens = purpose == "embed" and len(pipeline.poolings) == 1 and not stages
        return replace(
            cls._read_common(root, config, architecture, transformer, tokenizer),
            tasks=["embed", "tokens"] if has_tokens else [purpose],
            poolings=pipeline.poolings,
            include_prompt=pipeline.include_prompt,
            stages=stages,
            dimensions=pipeline.num_columns,
            normalize=normalize,
            encodings=["float32", "int8", "binary"] if quantizes else ["float32"],
            prompts=settings.prompts,
            default_prompt_name=settings.default_prompt_name,
            separator_id=separator_id,
        )

    @classmethod
    def _read_common(
        cls, root: Path, config: JsonFile, architecture: Architecture, transformer: JsonFile, tokenizer: TokenizerFile
    ) -> Checkpoint:
        """The fields that every model has; the caller fills in those of its purpose."""
        folder = config.path.parent
        length_limit = _length_limit(transformer, tokenizer.settings)
        tokenizer.check_room(length_limit)
        return cls(
            root=root,
            folder=folder,
            config=config,
            config_sha256=sha256_of(config.path),
            architecture=architecture.name,
            tasks=[],
            poolings=(),
            include_prompt=True,
            stages=(),
            dimensions=0,
            normalize=False,
            encodings=["float32"],
            lower_case=transformer.flag("do_lower_case", default=False),
            length_limit=length_limit,
            prompts={},
            default_prompt_name=None,
            tokenizer_sha256=tokenizer.sha256,
            separator_id=None,
            scoring=None,
            splade=None,
        )

    @classmethod
    def _read_sparse(
        cls, root: Path, modules: list[Module], config: JsonFile, architecture: Architecture
    ) -> Checkpoint:
        folder = config.path.parent
        vocab_size = config.integer("vocab_size")
        if modules:
            settings = _SentenceSettings.read(root, _MODEL_TYPES["sparse"])
            transformer = _read_transformer(folder, _FORMERLY_FILLING if modules[0].kind != "Transformer" else _FILLING)
            splade = read_splade(JsonFile.read_optional(root / modules[1].folder / "config.json"), vocab_size)
        else:
            settings = _SentenceSettings({}, None, None)
            transformer = JsonFile(folder / _TRANSFORMER_FILES[0], {})
            splade = read_bare(architecture, config)
        check_masked(architecture, config)
        tokenizer = TokenizerFile.read(folder, config)
        return replace(
            cls._read_common(root, config, architecture, transformer, tokenizer),
            tasks=["sparse"],
            dimensions=vocab_size,
            encodings=["sparse"],
            prompts=settings.prompts,
            default_prompt_name=settings.default_prompt_name,
            splade=splade,
        )

    @classmethod
    def _read_scorer(
        cls, root: Path, modules: list[Module], config: JsonFile, architecture: Architecture, task: Task
    ) -> Checkpoint:
        folder, is_classifier = config.path.parent, architecture.score_head is not None
        # Without modules.json sentence-transformers reads neither of its two files of settings.
        transformer = JsonFile(folder / _TRANSFORMER_FILES[0], {})
        settings, logit_score = JsonFile(root / _SETTINGS, {}), None
        if modules:
            settings = _read_cross_encoder_settings(root)
            transformer = _read_transformer(folder, _CLASSIFYING if is_classifier else _GENERATING)
            logit_score = JsonFile.read(root / modules[1].folder / "config.json") if modules[1:] else None
        tokenizer = TokenizerFile.read(folder, config)
        files = CrossEncoderFiles(
            settings=settings,
            transformer=transformer,
            tokenizer=tokenizer.settings,
            logit_score=logit_score,
        )
        if is_classifier:
            scoring = read_classifier(architecture, config, files)
        else:
            scoring = read_language_model(architecture, config, files, task, tokenizer.vocabulary())
        return replace(
            cls._read_common(root, config, architecture, transformer, tokenizer),
            tasks=["score"],
            dimensions=scoring.num_labels,
            scoring=scoring,
        )


def _choose_purpose(architecture: Architecture, config: JsonFile, modules: list[Module], task: Task) -> _Purpose:
    """What the folder says it is for, else what the operator says, else "embed".

    Raises:
        ModelError: the operator contradicts the folder, or the folder contradicts itself.
    """
    kinds = [module.kind for module in modules]
    declared: _Purpose | None = None
    if modules:
        declared = "embed" if "Pooling" in kinds else "sparse" if kinds in SPARSE_CLASSES else "tokens"
    if architecture.score_head is not None:
        if kinds not in ([], ["Transformer"]):
            modules[0].entry.refuse(
                "type", f"a {architecture.name} scores by its own head, and needs no modules {kinds}."
            )
        declared = "score"
    elif kinds in SCORING_CLASSES:
        if kinds == ["Transformer"] or architecture.kind != "causal_lm":
            refuse_modules(modules)
        declared = "score"
    if task == "auto":
        return declared or "embed"
    if declared not in (None, task):
        raise ModelError(f"--task {task}: {config.path} is of a {architecture.name} that is for {_PURPOSES[declared]}.")
    return task


# --- config.json, settings, limits ---

_SETTINGS = "config_sentence_transformers.json"

# What sentence-transformers calls a model for each purpose; the first is the default.
_MODEL_TYPES: Mapping[_Purpose, str] = MappingProxyType(
    {"embed": "SentenceTransformer", "tokens": "MultiVectorEncoder", "sparse": "SparseEncoder"}
)


def read_architecture(config: JsonFile) -> Architecture:
    """The row of the one architecture that config.json names.

    Raises:
        ModelError: there are none or several, no family has it, or it brings unknown code; the weights are quantized;
            or a size is larger than any model's.
    """
    if config.values.get("quantization_config"):
        config.refuse("quantization_config", "quantized weights are not supported.")
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        config.refuse("architectures", f"a list of one name is needed, not {architectures!r}.")
    row = find_architecture(architectures[0], config)
    for most, fields in _LARGEST.items():
        for field in fields:
            value = config.values.get(field)
            if type(value) is int and value > most:
                config.refuse(field, f"{value} is more than any model has; up to {most} is supported.")
    return row


@dataclass(frozen=True, slots=True)
class _SentenceSettings:
    prompts: dict[str, str]
    default_prompt_name: str | None
    truncate_dim: int | None

    @classmethod
    def read(cls, root: Path, expected_type: str) -> _SentenceSettings:
        config = JsonFile.read_optional(root / _SETTINGS)
        model_type = config.text("model_type") or _MODEL_TYPES["embed"]
        if model_type != expected_type:
            config.refuse("model_type", f"{model_type!r}, but its modules are those of a {expected_type}.")
        # `similarity_fn_name` says how clients compare vectors, `requirements` which software they need.
        harmless = {"__version__", "similarity_fn_name", "requirements"}
        own = {"truncate_dim"} if model_type == _MODEL_TYPES["embed"] else set()
        config.refuse_unknown(frozenset({*harmless, *own, "prompts", "default_prompt_name", "model_type"}))
        texts = config.values.get("prompts") or {}
        if not isinstance(texts, dict) or not all(text is None or isinstance(text, str) for text in texts.values()):
            config.refuse("prompts", "a map of names to texts is needed.")
        prompts = {name: text or "" for name, text in texts.items()}
        default = config.text("default_prompt_name")
        if default is not None and default not in prompts:
            if default not in _USUAL_PROMPTS:
                config.refuse("default_prompt_name", f"{default!r} is none of the prompts.")
            default = None
        return cls(prompts, default, config.optional_integer("truncate_dim"))


def _read_cross_encoder_settings(root: Path) -> JsonFile:
    """Raises ModelError: settings of something else than a CrossEncoder, or a field that is not understood."""
    config = JsonFile.read_optional(root / _SETTINGS)
    # `keep_in_fp32_modules` is met: heads compute in float32. `prompts` are used only by `default_prompt_name`.
    harmless = {"__version__", "requirements", "keep_in_fp32_modules", "prompts"}
    config.refuse_unknown(frozenset({*harmless, "activation_fn", "default_prompt_name", "model_type"}))
    if (model_type := config.text("model_type")) != "CrossEncoder":
        config.refuse("model_type", f"'CrossEncoder' is needed of a model that scores, not {model_type!r}.")
    return config


@dataclass(frozen=True, slots=True)
class _Usage:
    """What a Transformer is loaded for, in sentence-transformers' words, and which of its outputs counts."""

    task: str
    output_name: str
    method_output_name: str
    is_implied: bool = False  # whether a file that says nothing means this


_EMBEDDING = _Usage("feature-extraction", "token_embeddings", "last_hidden_state", is_implied=True)
_FILLING = _Usage("fill-mask", "token_embeddings", "logits")
_FORMERLY_FILLING = replace(_FILLING, is_implied=True)
_CLASSIFYING = _Usage("sequence-classification", "scores", "logits")
_GENERATING = _Usage("text-generation", "causal_logits", "logits")


def _read_transformer(folder: Path, usage: _Usage = _EMBEDDING) -> JsonFile:
    """The Transformer's settings: its length limit, lower-casing, and which of its outputs counts."""
    files = [JsonFile.read_optional(folder / name) for name in _TRANSFORMER_FILES]
    config = next((file for file in files if file.values), files[0])
    known: dict[str, object] = {
        "transformer_task": usage.task,
        "module_output_name": usage.output_name,
        "processing_kwargs": {},
        "tokenizer_name_or_path": None,
        # For models with a vector for each token.
        "query_length": None,
        "document_length": None,
        "query_expansion": None,
    }
    # `unpad_inputs` and `cache_dir` change no numbers.
    read = {"max_seq_length", "do_lower_case", "modality_config", "unpad_inputs", "cache_dir"}
    config.refuse_unknown(frozenset({*read, *known, *_HARMLESS_OPTIONS, *_FORMER_OPTIONS}))
    plain = _without_chat_template(config) if usage in (_CLASSIFYING, _GENERATING) else config
    for field, value in known.items():
        if plain.values.get(field) not in (None, value):
            config.refuse(field, f"only {value!r} is supported.")
    if not usage.is_implied and config.text("transformer_task") is None:  # sentence-transformers would embed
        config.refuse("transformer_task", f"missing; {usage.task!r} is needed of these modules.")
    # With a "message" among the modalities, texts would be put into a chat template.
    text_alone = {"text": {"method": "forward", "method_output_name": usage.method_output_name}}
    if plain.values.get("modality_config") not in (None, text_alone):
        config.refuse("modality_config", f"only {text_alone!r} is supported.")
    for field in (*_HARMLESS_OPTIONS, *_FORMER_OPTIONS):
        options = config.values.get(field) or {}
        if not isinstance(options, dict):
            config.refuse(field, "a map of options is needed.")
        if others := sorted(set(options) - _HARMLESS_OPTIONS[_FORMER_OPTIONS.get(field, field)]):
            config.refuse(field, f"{', '.join(others)} might change the vectors.")
    return config


def _without_chat_template(config: JsonFile) -> JsonFile:
    """The Transformer's file without what concerns a chat template: `scoring` decides on that."""
    modalities, options = config.values.get("modality_config"), config.values.get("processing_kwargs")
    if not isinstance(modalities, dict) or MESSAGE not in modalities:
        return config
    values = {**config.values, "modality_config": {name: modalities[name] for name in modalities if name != MESSAGE}}
    if isinstance(options, dict):
        values["processing_kwargs"] = {name: options[name] for name in options if name != "chat_template"}
    return JsonFile(config.path, values)


def _length_limit(transformer: JsonFile, tokenizer: JsonFile) -> int | None:
    """`max_seq_length` if it is given, else the tokenizer's own limit, as in sentence-transformers."""
    declared = transformer.optional_integer("max_seq_length")
    if declared is not None:
        return declared
    value = tokenizer.values.get("model_max_length", tokenizer.values.get("max_len"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _SANE_MODEL_MAX_LENGTH:
        return None
    return int(value)


def main() -> int:
    """`python -m worker.checkpoint.declared FOLDER [TASK]`: says whether the folder declares a model that can be
    served.

    It takes a moment and no torch, and does not read the weights.
    """
    folder, task = sys.argv[1], sys.argv[2] if sys.argv[2:] else "auto"
    try:
        Checkpoint.read(Path(folder), cast("Task", task))
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
