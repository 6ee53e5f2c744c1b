"""Reads the files of a model's folder, and the fields of JSON files by type. Errors are `ModelError`s that name the
file."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_LARGEST_INTEGER = 2**31 - 1  # the most of anything that a model may have

# No model has more positions. A larger number is a slip, and its tables would fill the memory.
MAX_POSITIONS = 2**22


# More than any model takes: what is beyond was not meant, and its tables would fill the memory.
MAX_POSITIONS = 2**22


class ModelError(Exception):
    """The model cannot be served with these files. The text names the file and the field, tensor or flag."""


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object of the model's folder. Its fields are read by type, and a wrong one is a `ModelError`."""

    path: Path
    values: dict[str, object]

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """Raises ModelError: the file is missing or holds no JSON object."""
        value = read_json(path)
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


def read_file(path: Path) -> bytes:
    """A file of the model, whole and in private memory.

    Never a memory map: a file that is truncated under a reader of its map kills the reader (SIGBUS).

    Raises:
        ModelError: missing, not a regular file, or not readable.
    """
    # Symbolic links are followed: the hub's cache consists of them. A pipe would block for ever.
    if not path.exists():
        raise ModelError(f"{path} is missing.")
    if not path.is_file():
        raise ModelError(f"{path} is not a regular file.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def read_json(path: Path) -> object:
    try:
        value: object = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    return value


def sha256_of(path: Path) -> str:
    return hashlib.sha256(read_file(path)).hexdigest()
