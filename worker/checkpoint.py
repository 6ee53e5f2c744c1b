"""What a model's folder declares, apart from its weights: architecture, pooling, limits, prompts, tokenizer.

The folder is read as sentence-transformers reads it (`modules.json` and the files that it leads to), or, without
`modules.json`, as a bare encoder: mean pooling, no normalisation, which is what sentence-transformers does with one.

Everything that could change a vector is either understood or stops the start with a `ModelError` that names the file
and the field. A warning was rejected: the server would look healthy and answer numbers that no other software gives.
No code from a model is run, ever. A folder that brings some (`auto_map`) is refused, unless its architecture is one
whose code a family of `worker.models` stands for. What that code does after pooling (pplx-embed's quantising module) is
known by the name of its class.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn, TypeAlias, cast, get_args

from common.tokenization import load_tokenizer
from worker.models import check_architecture, check_own_code, read_hidden_size, stands_for_own_code

logger = logging.getLogger(__name__)

Pooling: TypeAlias = Literal["cls", "mean", "last", "max"]

_MODULE_CLASSES = ("Transformer", "Pooling", "Normalize")

# pplx-embed's own: it makes int8 or bits of what is pooled. Without it vectors are float32 alone.
_QUANTIZER_MODULE, _QUANTIZER_CLASS = "st_quantize", "FlexibleQuantizer"
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_UNSUPPORTED_POOLING_FLAGS = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_POOLING_NAMES: dict[object, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}

_LARGEST_INTEGER = 2**31 - 1  # of anything that a model has so many of

# Tokenizers without a limit of their own write 1e30.
_SANE_MODEL_MAX_LENGTH = 10_000_000


class ModelError(Exception):
    """This model cannot be served as its files are. The text names the file and the field, tensor or flag."""


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object of the model's folder, whose fields are read by type; a wrong one is a `ModelError`."""

    path: Path
    values: dict[str, object]

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """Raises ModelError: the file is missing or holds no JSON object."""
        value = _read_json(path)
        if not isinstance(value, dict):
            raise ModelError(f"{path}: a JSON object is needed, not {type(value).__name__}.")
        return cls(path, value)

    @classmethod
    def read_optional(cls, path: Path) -> JsonFile:
        """As `read`; a missing file has no fields."""
        return cls.read(path) if path.exists() else cls(path, {})

    def refuse(self, field: str, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: {field}: {why}")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        for field, value in self.values.items():
            if field not in known and value is not None:
                self.refuse(field, "a field that is not understood; it might change the vectors.")

    def integer(self, field: str) -> int:
        """A positive integer that must be there."""
        value = self.optional_integer(field)
        if value is None:
            self.refuse(field, "missing.")
        return value

    def optional_integer(self, field: str) -> int | None:
        value = self.values.get(field)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= _LARGEST_INTEGER:
            self.refuse(field, f"a positive integer is needed, not {value!r}.")
        return value

    def number(self, field: str) -> float:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            self.refuse(field, f"a number between 0 and 1 is needed, not {value!r}.")
        return float(value)

    def positive_number(self, field: str) -> float:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(field, f"a positive number is needed, not {value!r}.")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, f"true or false is needed, not {value!r}.")
        return value

    def text(self, field: str) -> str | None:
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            self.refuse(field, f"a text is needed, not {value!r}.")
        return value


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, understood."""

    folder: Path  # where config.json, the weights and tokenizer.json are; not always where modules.json is
    config: JsonFile
    config_sha256: str
    architecture: str
    pooling: Pooling
    normalize: bool
    encodings: list[str]  # what vectors may be asked for, names of common.protocol
    lower_case: bool
    length_limit: int | None  # tokens, as its files declare; the position table may set a lower one
    prompts: dict[str, str]
    default_prompt_name: str | None
    tokenizer_sha256: str

    @classmethod
    def read(cls, root: Path) -> Checkpoint:
        """Everything that the folder declares.

        Raises:
            ModelError: a file is missing or malformed, or declares what is not supported.
        """
        modules = _read_modules(root)
        folder = root / modules.transformer
        config = JsonFile.read(folder / "config.json")
        architecture = _read_architecture(config)
        if modules.quantizes and not stands_for_own_code(architecture):
            raise ModelError(f"{root / 'modules.json'}: type: {_QUANTIZER_CLASS} is not known of a {architecture}.")
        hidden_size = read_hidden_size(architecture, config)
        settings = _read_sentence_settings(root)
        pooling: Pooling = "mean"
        transformer = JsonFile(folder / "sentence_bert_config.json", {})
        if modules.pooling is None:
            # sentence-transformers then reads neither 1_Pooling nor sentence_bert_config.json, and so its length limit.
            logger.info("%s has no modules.json: mean pooling, no normalisation", root)
        else:
            pooling = _read_pooling(root / modules.pooling / "config.json", hidden_size, settings.prompts)
            transformer = JsonFile.read_optional(transformer.path)
            _check_transformer(transformer)
        return cls(
            folder=folder,
            config=config,
            config_sha256=_sha256(config.path),
            architecture=architecture,
            pooling=pooling,
            normalize=modules.normalize,
            encodings=["float32", "int8", "binary"] if modules.quantizes else ["float32"],
            lower_case=transformer.flag("do_lower_case", default=False),
            length_limit=_length_limit(transformer, folder),
            prompts=settings.prompts,
            default_prompt_name=settings.default_prompt_name,
            tokenizer_sha256=_check_tokenizer(folder / "tokenizer.json", config),
        )


@dataclass(frozen=True, slots=True)
class _Modules:
    transformer: str  # folder, relative to the root
    pooling: str | None
    normalize: bool
    quantizes: bool


@dataclass(frozen=True, slots=True)
class _SentenceSettings:
    prompts: dict[str, str]
    default_prompt_name: str | None


def _read_modules(root: Path) -> _Modules:
    path = root / "modules.json"
    if not path.exists():
        return _Modules(transformer="", pooling=None, normalize=False, quantizes=False)
    entries = _read_json(path)
    if not isinstance(entries, list):
        raise ModelError(f"{path}: a list of modules is needed, not {type(entries).__name__}.")
    classes: list[str] = []
    folders: list[str] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ModelError(f"{path}: module {index}: a JSON object is needed.")
        module = JsonFile(path, entry)
        # sentence_transformers.models.Pooling, or the longer names of later releases: the class is what counts.
        package, _, class_name = (module.text("type") or "").rpartition(".")
        of_library = package.partition(".")[0] == "sentence_transformers" and class_name in _MODULE_CLASSES
        if not of_library and (package, class_name) != (_QUANTIZER_MODULE, _QUANTIZER_CLASS):
            module.refuse("type", f"module {module.text('type')!r} is not supported.")
        folder = module.text("path") or ""
        if PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts:
            module.refuse("path", f"{folder!r} leads out of the model's folder.")
        classes.append(class_name)
        folders.append(folder)
    ending = classes[2:]
    if classes[:2] != ["Transformer", "Pooling"] or ending not in ([], ["Normalize"], [_QUANTIZER_CLASS]):
        known = f"Transformer, Pooling and perhaps Normalize or {_QUANTIZER_CLASS}"
        raise ModelError(f"{path}: type: {known} are supported, not {classes}.")
    return _Modules(
        transformer=folders[0],
        pooling=folders[1],
        normalize=ending == ["Normalize"],
        quantizes=ending == [_QUANTIZER_CLASS],
    )


def _read_architecture(config: JsonFile) -> str:
    if config.values.get("quantization_config"):
        config.refuse("quantization_config", "quantized weights are not supported.")
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        config.refuse("architectures", f"a list of one name is needed, not {architectures!r}.")
    check_own_code(architectures[0], config)
    return architectures[0]


def _read_pooling(path: Path, hidden_size: int, prompts: dict[str, str]) -> Pooling:
    config = JsonFile.read(path)
    config.refuse_unknown(
        frozenset({"word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode"})
        | frozenset(_POOLING_FLAGS)
        | frozenset(_UNSUPPORTED_POOLING_FLAGS)
    )
    for field in ("word_embedding_dimension", "embedding_dimension"):
        width = config.optional_integer(field)
        if width is not None and width != hidden_size:
            config.refuse(field, f"{width}, but the model is {hidden_size} wide.")
    if not config.flag("include_prompt", default=True) and any(prompts.values()):
        config.refuse("include_prompt", "false is not supported together with prompts.")
    for field in _UNSUPPORTED_POOLING_FLAGS:
        if config.flag(field, default=False):
            config.refuse(field, "this pooling is not supported.")
    chosen = [field for field in _POOLING_FLAGS if config.flag(field, default=False)]
    name = config.values.get("pooling_mode")
    if len(chosen) > 1:
        config.refuse(", ".join(chosen), "several poolings at once are not supported.")
    if chosen and name is None:
        return _POOLING_FLAGS[chosen[0]]
    if chosen or not isinstance(name, str) or name not in _POOLING_NAMES:
        config.refuse("pooling_mode", f"one of {', '.join(get_args(Pooling))} is needed.")
    return _POOLING_NAMES[name]


def _read_sentence_settings(root: Path) -> _SentenceSettings:
    config = JsonFile.read_optional(root / "config_sentence_transformers.json")
    config.refuse_unknown(
        frozenset({"__version__", "prompts", "default_prompt_name", "similarity_fn_name", "model_type"})
    )
    if (model_type := config.text("model_type")) not in (None, "SentenceTransformer"):
        config.refuse("model_type", f"{model_type!r} is not supported.")
    prompts = config.values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        config.refuse("prompts", "a map of names to texts is needed.")
    default = config.text("default_prompt_name")
    if default is not None and default not in prompts:
        config.refuse("default_prompt_name", f"{default!r} is none of the prompts.")
    return _SentenceSettings(cast("dict[str, str]", prompts), default)


def _check_transformer(config: JsonFile) -> None:
    known: dict[str, object] = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    config.refuse_unknown(frozenset({"max_seq_length", "do_lower_case", "modality_config", *known}))
    for field, value in known.items():
        if config.values.get(field) not in (None, value):
            config.refuse(field, f"only {value!r} is supported.")
    text_alone = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    if config.values.get("modality_config") not in (None, text_alone):
        config.refuse("modality_config", f"only {text_alone!r} is supported.")


def _length_limit(transformer: JsonFile, folder: Path) -> int | None:
    """max_seq_length where it is given, else the tokenizer's own limit: the former overrides the latter in
    sentence-transformers too."""
    declared = transformer.optional_integer("max_seq_length")
    if declared is not None:
        return declared
    value = JsonFile.read_optional(folder / "tokenizer_config.json").values.get("model_max_length")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _SANE_MODEL_MAX_LENGTH:
        return None
    return int(value)


def _check_tokenizer(path: Path, config: JsonFile) -> str:
    """The SHA-256 of a tokenizer.json whose ids all have a row in the embedding table."""
    content = read_file(path)
    try:
        vocabulary = load_tokenizer(content).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception
        raise ModelError(f"{path}: not a tokenizer: {error}") from None
    num_rows = config.integer("vocab_size")
    num_ids = max(vocabulary.values(), default=-1) + 1
    if num_ids > num_rows:
        raise ModelError(f"{path}: its ids go up to {num_ids - 1}, but {config.path}: vocab_size is {num_rows}.")
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes:
    """A file of the model, whole and in private memory.

    Never a memory map: a file that is truncated under a reader of its map kills the reader (SIGBUS).

    Raises:
        ModelError: missing, not a regular file, or not readable.
    """
    # A symbolic link is followed (the hub's cache consists of them); a pipe would block for ever.
    if not path.exists():
        raise ModelError(f"{path} is missing.")
    if not path.is_file():
        raise ModelError(f"{path} is not a regular file.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def _read_json(path: Path) -> object:
    try:
        value: object = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    return value


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_file(path)).hexdigest()


def main() -> int:
    """`python -m worker.checkpoint FOLDER`: whether the folder declares a model that can be served, in a moment and
    without torch. Its weights are not looked into."""
    try:
        checkpoint = Checkpoint.read(Path(sys.argv[1]))
        check_architecture(checkpoint.architecture, checkpoint.config)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main())
