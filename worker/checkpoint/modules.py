"""The modules of a sentence-transformers folder: how rows are made of hidden states, as `modules.json` says.

    Transformer → Pooling → any of Dense, LayerNorm, Normalize and Dropout, in any order → perhaps a quantiser
    Transformer → any of Dense, Normalize and MultiVectorMask, in any order: a row for each token
    Transformer → SpladePooling: a weight for each token of the vocabulary (`splade`)
    Transformer → perhaps LogitScore: a score (`scoring`)

Files are read as releases 2 to 6 of sentence-transformers have written them. An unknown module is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal, NoReturn, TypeAlias

from worker.checkpoint.files import JsonFile, ModelError, read_json

Pooling: TypeAlias = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weighted_mean"]

# sentence-transformers' modules that are supported; its releases have them in different packages. Others (CNN, LSTM,
# Router, SparseAutoEncoder ...) are refused by name.
_MODULE_CLASSES = (
    "Transformer",
    "Pooling",
    "Dense",
    "LayerNorm",
    "Normalize",
    "Dropout",
    "LogitScore",
    "MLMTransformer",
    "SpladePooling",
    "MultiVectorMask",
)

# What may follow the Pooling, and what may follow the Transformer of a model that makes a row for each token.
_POOLED_CLASSES = frozenset({"Dense", "LayerNorm", "Normalize", "Dropout"})
_TOKEN_CLASSES = frozenset({"Dense", "Normalize", "MultiVectorMask"})

# What a CrossEncoder has: only a classifier, or a language model and a module that makes a score of its logits.
SCORING_CLASSES = (["Transformer"], ["Transformer", "LogitScore"])

# What a SparseEncoder has. In older releases it has a Transformer of its own, which always fills masks.
SPARSE_CLASSES = (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"])

# pplx-embed's own module makes int8 or bits of the pooled row. Without it vectors are float32. The argument
# `quantization` that a caller of sentence-transformers passes to it is the encoding of a request here: "int8" is int8,
# "binary" (±1) and "ubinary" (bits) are binary. Without that argument the module gives int8; a request without an
# encoding gets float32.
_QUANTIZER_MODULE, _QUANTIZER_CLASS = "st_quantize", "FlexibleQuantizer"

# If several flags are set, their rows stand in this order, whatever the order in the file.
_POOLING_FLAGS: Mapping[str, Pooling] = MappingProxyType(
    {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
        "pooling_mode_weightedmean_tokens": "weighted_mean",
        "pooling_mode_lasttoken": "last",
    }
)
_POOLING_NAMES: Mapping[object, Pooling] = MappingProxyType(
    {
        "cls": "cls",
        "max": "max",
        "mean": "mean",
        "mean_sqrt_len_tokens": "mean_sqrt_len",
        "weightedmean": "weighted_mean",
        "lasttoken": "last",
    }
)

# Classes of torch.nn that a Dense may name. Its file has no options for them, so the defaults hold.
_ACTIVATIONS = frozenset(
    {"Identity", "Tanh", "ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Mish", "Sigmoid", "Softplus", "Softsign"}
)
_ACTIVATION_PACKAGES = ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")


@dataclass(frozen=True, slots=True)
class DenseStage:
    """A linear layer and its activation; the row itself may be added, or a linear map of it if the widths differ."""

    folder: str  # relative to the root, so that a model that has moved is equal to itself
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str  # a class of torch.nn, with its defaults
    has_residual: bool


@dataclass(frozen=True, slots=True)
class NormStage:
    """Layer normalisation with weights and biases."""

    folder: str
    num_columns: int


@dataclass(frozen=True, slots=True)
class UnitStage:
    """Each row to unit length."""


@dataclass(frozen=True, slots=True)
class CutStage:
    """The first columns alone."""

    num_columns: int


Stage: TypeAlias = DenseStage | NormStage | UnitStage | CutStage


@dataclass(frozen=True, slots=True)
class Module:
    """An entry of modules.json."""

    entry: JsonFile
    kind: str  # the name of its class
    folder: str  # relative to the root


def read_modules(root: Path) -> list[Module]:
    """The modules in their order; an empty list if there is no modules.json."""
    path = root / "modules.json"
    if not path.exists():
        return []
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ModelError(f"{path}: a list of modules is needed, not {entries!r}.")
    modules = [_read_module(path, index, entry) for index, entry in enumerate(entries)]
    kinds = [module.kind for module in modules]
    is_pooled = kinds[:2] == ["Transformer", "Pooling"] and {*_POOLED_CLASSES, _QUANTIZER_CLASS}.issuperset(kinds[2:])
    has_tokens = kinds[0] == "Transformer" and len(kinds) > 1 and _TOKEN_CLASSES.issuperset(kinds[1:])
    if not (is_pooled or has_tokens or kinds in SCORING_CLASSES or kinds in SPARSE_CLASSES):
        refuse_modules(modules)
    names = [module.entry.text("name") for module in modules]
    if len(set(names)) < len(names):  # sentence-transformers would replace one by the other
        modules[0].entry.refuse("name", f"{names}: each module needs a name of its own.")
    return modules


def refuse_modules(modules: list[Module]) -> NoReturn:
    kinds = [module.kind for module in modules]
    modules[0].entry.refuse("type", f"a Transformer, a Pooling and what may follow are supported, not {kinds}.")


def _read_module(path: Path, index: int, value: object) -> Module:
    if not isinstance(value, dict):
        raise ModelError(f"{path}: module {index}: a JSON object is needed.")
    entry = JsonFile(path, value)
    entry.refuse_unknown(frozenset({"idx", "name", "path", "type", "kwargs"}))
    kind = entry.text("type") or ""
    # Only the class counts: later releases have longer names for sentence_transformers.models.Pooling.
    package, _, class_name = kind.rpartition(".")
    if package.partition(".")[0] == "sentence_transformers":
        if class_name not in _MODULE_CLASSES:
            entry.refuse("type", f"module {kind!r} is not supported; supported are {', '.join(_MODULE_CLASSES)}.")
    elif (package, class_name) != (_QUANTIZER_MODULE, _QUANTIZER_CLASS):
        entry.refuse("type", f"module {kind!r} is code of others, which is not known and never run.")
    folder = entry.text("path") or ""
    if PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts:
        entry.refuse("path", f"{folder!r} leads out of the model's folder.")
    # Which arguments of `encode` sentence-transformers hands on to this module: names alone, so that nothing changes
    # until a caller passes one, which is not possible here.
    names = entry.values.get("kwargs")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        entry.refuse("kwargs", f"a list of names is needed, not {names!r}.")
    return Module(entry, class_name, folder)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How rows are made of hidden states."""

    poolings: tuple[Pooling, ...]
    include_prompt: bool
    stages: tuple[Stage, ...]
    quantizes: bool
    num_columns: int  # of a row at the end

    @classmethod
    def read(cls, root: Path, modules: list[Module], hidden_size: int, truncate_dim: int | None) -> Pipeline:
        poolings: tuple[Pooling, ...] = ("cls",)  # for a row of one token: its hidden state
        include_prompt, feature, rest = True, "token_embeddings", modules[1:]
        if modules[1].kind == "Pooling":
            poolings, include_prompt = _read_pooling(root / modules[1].folder / "config.json", hidden_size)
            feature, rest = "sentence_embedding", modules[2:]
        num_columns = len(poolings) * hidden_size
        stages: list[Stage] = []
        following = [module for module in rest if module.kind != "Dropout"]  # which acts only in training
        quantizes = any(module.kind == _QUANTIZER_CLASS for module in following)
        if quantizes and len(following) > 1:
            kinds = [module.kind for module in following]
            following[0].entry.refuse(
                "type", f"{_QUANTIZER_CLASS} is supported directly after the Pooling, not {kinds}."
            )
        for module in following:
            if module.kind == "Dense":
                dense = _read_dense(root, module.folder, num_columns, feature)
                stages.append(dense)
                num_columns = dense.num_outputs
            elif module.kind == "LayerNorm":
                stages.append(_read_norm(root, module.folder, num_columns))
            elif module.kind == "Normalize":
                config = JsonFile.read_optional(root / module.folder / "config.json")
                config.refuse_unknown(frozenset({"module_input_name", "module_output_name"}))
                _check_feature_names(config, feature)
                stages.append(UnitStage())
            elif module.kind == "MultiVectorMask":
                _check_mask(JsonFile.read_optional(root / module.folder / "config.json"))
        if truncate_dim is not None and truncate_dim < num_columns:
            # After a Normalize, as in sentence-transformers: such a row is shorter than unit length.
            stages.append(CutStage(truncate_dim))
            num_columns = truncate_dim
        return cls(poolings, include_prompt, tuple(stages), quantizes, num_columns)


def _read_pooling(path: Path, hidden_size: int) -> tuple[tuple[Pooling, ...], bool]:
    """The poolings, and whether the tokens of a prompt are pooled."""
    config = JsonFile.read(path)
    widths = ("word_embedding_dimension", "embedding_dimension")
    config.refuse_unknown(frozenset({*widths, "include_prompt", "pooling_mode", *_POOLING_FLAGS}))
    for field in widths:
        width = config.optional_integer(field)
        if width is not None and width != hidden_size:
            config.refuse(field, f"{width}, but the model is {hidden_size} wide.")
    poolings = _read_pooling_mode(config)
    include_prompt = config.flag("include_prompt", default=True)
    if not include_prompt and "weighted_mean" in poolings:
        config.refuse("include_prompt", "false is not supported for a weighted mean: its weights count the prompt.")
    return poolings, include_prompt


def _read_pooling_mode(config: JsonFile) -> tuple[Pooling, ...]:
    """One name, a list of names or, in older files, a flag for each; the mean if there is none of these."""
    flags = {field: config.flag(field, default=False) for field in _POOLING_FLAGS if field in config.values}
    flagged = tuple(_POOLING_FLAGS[field] for field in _POOLING_FLAGS if flags.get(field))
    names = config.values.get("pooling_mode")
    if names is None:
        if flags and not flagged:
            config.refuse(", ".join(flags), "one of them has to be true.")
        return flagged or ("mean",)
    listed = names if isinstance(names, list) else [names]
    if not listed or not all(isinstance(name, str) and name in _POOLING_NAMES for name in listed):
        config.refuse(
            "pooling_mode", f"one or a list of {', '.join(map(str, _POOLING_NAMES))} is needed, not {names!r}."
        )
    poolings = tuple(_POOLING_NAMES[name] for name in listed)
    if flagged and set(flagged) != set(poolings):
        config.refuse("pooling_mode", f"{names!r} contradicts the flags beside it.")
    return poolings


def _read_dense(root: Path, folder: str, num_columns: int, feature: str) -> DenseStage:
    config = JsonFile.read(root / folder / "config.json")
    config.refuse_unknown(
        frozenset(
            {
                "in_features",
                "out_features",
                "bias",
                "activation_function",
                "module_input_name",
                "module_output_name",
                "use_residual",
            }
        )
    )
    _check_feature_names(config, feature)
    if config.integer("in_features") != num_columns:
        config.refuse("in_features", f"{config.integer('in_features')}, but the rows that come are {num_columns} wide.")
    activation = config.text("activation_function")
    if activation is None and "activation_function" not in config.values:
        activation = "torch.nn.Tanh"
    package, _, name = (activation or "").rpartition(".")
    if package not in _ACTIVATION_PACKAGES or name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        config.refuse("activation_function", f"{activation!r} is not supported; supported of torch.nn are {known}.")
    _check_stage_weights(root / folder)
    return DenseStage(
        folder=folder,
        num_inputs=num_columns,
        num_outputs=config.integer("out_features"),
        has_bias=config.flag("bias", default=True),
        activation=name,
        has_residual=config.flag("use_residual", default=False),
    )


def _read_norm(root: Path, folder: str, num_columns: int) -> NormStage:
    config = JsonFile.read(root / folder / "config.json")
    config.refuse_unknown(frozenset({"dimension"}))
    if config.integer("dimension") != num_columns:
        config.refuse("dimension", f"{config.integer('dimension')}, but the rows that come are {num_columns} wide.")
    _check_stage_weights(root / folder)
    return NormStage(folder, num_columns)


def _check_feature_names(config: JsonFile, feature: str) -> None:
    """Raises ModelError: the module reads or writes another feature than `feature`."""
    given = config.text("module_input_name") or "sentence_embedding"
    if given != feature:
        config.refuse("module_input_name", f"only {feature!r} is supported after these modules, not {given!r}.")
    if (made := config.text("module_output_name")) not in (None, feature):
        config.refuse("module_output_name", f"only {feature!r} is supported after these modules, not {made!r}.")


def _check_mask(config: JsonFile) -> None:
    """Raises ModelError: some tokens would have no row, and which ones would depend on the kind of text."""
    config.refuse_unknown(frozenset({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"}))
    for field in ("skiplist_words", "keep_only_token_ids"):
        if config.values.get(field):
            config.refuse(field, "models that leave out some of a text's tokens are not supported.")


def _check_stage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    if path.exists():
        return
    former = folder / "pytorch_model.bin"
    found = f" (found {former.name}; if you trust it, load and save the model with sentence-transformers)"
    raise ModelError(f"{path} is missing: only safetensors weights are read{found if former.exists() else ''}.")
