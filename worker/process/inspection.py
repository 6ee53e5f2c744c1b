"""`hedgerow inspect`: how a model's folder is understood, and whether it can be served, in a second or two.

An inspection finds everything that a start would refuse, except numbers that are not finite. It reads only the headers
of the weights, and compares them with the model built on torch's meta device, which holds only shapes. A start ends at
the first problem. An inspection goes on as far as it can, because a person who repairs a folder wants the whole list.

Run as `python -m worker.process.inspection NAME FOLDER TASK text|json`; `common.deploy.cli` finds the folder.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from common.errors import EX_CONFIG
from common.text.tokenization import load_tokenizer
from worker.checkpoint.declared import Checkpoint, read_architecture
from worker.checkpoint.files import JsonFile, ModelError, read_file
from worker.checkpoint.weights import fit, listed, open_weights
from worker.engine.facts import check_pairs_and_chunks, describe, length_limit
from worker.models.build import build

if TYPE_CHECKING:
    from worker.checkpoint.scoring import Task
    from worker.models.interface import Model


_DIGEST_LENGTH = 16  # characters of a SHA-256 that are shown
_LABEL_WIDTH = 20
_PROBE = "a"  # a text that shows where special tokens go

Result = TypeVar("Result")
Facts = dict[str, object]  # what --json prints: texts, numbers, flags, and lists and maps of them


@dataclass(slots=True)
class Inspection:
    """The findings so far; `problems` is empty if the model can be served."""

    name: str
    folder: Path
    task: Task = "auto"  # what the operator says the model is for
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)  # by section

    @classmethod
    def of(cls, name: str, folder: Path, task: Task = "auto") -> Inspection:
        """Everything that can be found out about a folder without reading its weights."""
        inspection = cls(name, folder, task)
        inspection._inspect()
        return inspection

    @property
    def servable(self) -> bool:
        return not self.problems

    def _inspect(self) -> None:
        checkpoint = self._attempt(lambda: Checkpoint.read(self.folder, self.task))
        if checkpoint is not None:
            folder = checkpoint.folder
            self.facts["declared"] = _declared(checkpoint)
        elif (self.folder / "config.json").exists():
            folder = self.folder  # which usually holds the other files, too
        else:
            return
        model = self._attempt(lambda: _build_on_meta(JsonFile.read(folder / "config.json"), checkpoint))
        if model is not None:
            self.facts["model"] = _model_facts(model)
        if checkpoint is not None and model is not None:
            self.facts["length"] = _length_facts(checkpoint, model)
            self._attempt(lambda: check_pairs_and_chunks(describe(checkpoint, model, name=self.name)))
        tokenizer = self._attempt(lambda: _tokenizer_facts(folder))
        if tokenizer is not None:
            self.facts["tokenizer"] = tokenizer
        self._attempt(lambda: self._inspect_weights(folder, model))
        if checkpoint is not None and checkpoint.stages:
            self._attempt(lambda: _load_stages(checkpoint))
        if checkpoint is not None and checkpoint.scoring is not None and checkpoint.scoring.answers is not None:
            self._attempt(lambda: _check_answers(checkpoint, model))

    def _inspect_weights(self, folder: Path, model: Model | None) -> None:
        """Raises ModelError: a file is missing or damaged. Tensors that do not fit the model are noted."""
        with open_weights(folder) as weights:
            tensors = [tensor for file in weights.files for tensor in file.tensors.values()]
            facts: Facts = {
                "files": [file.path.name for file in weights.files],
                "bytes": sum(file.size_bytes for file in weights.files),
                "tensors": len(tensors),
                "dtypes": dict(sorted(Counter(tensor.dtype for tensor in tensors).items())),
            }
            self.facts["weights"] = facts
            if model is None:
                return
            shapes = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_tensors().items()}
            fitted = fit(weights, shapes, model.canonical_name)
            facts["not_needed"] = [tensor.name for tensor in fitted.unused]
            facts["prefix"] = fitted.wrapper
            self._note(*fitted.problems)

    def _attempt(self, find: Callable[[], Result]) -> Result | None:
        """What `find` returns; None if it refuses, and the problem is noted."""
        try:
            return find()
        except ModelError as error:
            self._note(str(error))
            return None

    def _note(self, *problems: str) -> None:
        self.problems += [problem for problem in dict.fromkeys(problems) if problem not in self.problems]

    # --- how it is shown ---

    def to_json(self) -> str:
        """One object on one line."""
        values = {"name": self.name, "folder": str(self.folder), "servable": self.servable, "problems": self.problems}
        return json.dumps(values | self.facts)

    def to_text(self) -> str:
        """A row for each fact, the sections apart, the verdict at the end."""
        sections = [_rows({"model": self.name, "folder": str(self.folder)})]
        sections += [_rows(facts) for facts in self.facts.values()]
        if self.servable:
            verdict = ["This model can be served. (Its weights were not read: a start checks that all are finite.)"]
        else:
            verdict = ["This model is refused:", *(f"  {problem}" for problem in self.problems)]
        return "\n\n".join("\n".join(lines) for lines in [*sections, verdict])


def _build_on_meta(config: JsonFile, checkpoint: Checkpoint | None) -> Model:
    """The model of a folder. Without a checkpoint, which has a problem, only its architecture counts."""
    architecture = read_architecture(config).name
    import torch  # only now: problems in the JSON files are found without it

    with torch.device("meta"):
        model = build(architecture, config)
        if checkpoint is None or checkpoint.splade is None:
            return model
        from worker.models.sparse import build_sparse

        return build_sparse(checkpoint, model, torch.device("meta"))[0]


def _load_stages(checkpoint: Checkpoint) -> None:
    """Raises ModelError: a stage after the pooling cannot be loaded. Its few weights are read."""
    import torch

    from worker.models.output import load_output

    load_output(checkpoint, torch.device("cpu"))


def _check_answers(checkpoint: Checkpoint, model: Model | None) -> None:
    """Raises ModelError: the weights lack the rows that a language model scores by."""
    from worker.models.yes_no_head import check_answer_rows

    if model is not None:
        check_answer_rows(checkpoint, model)


def _declared(checkpoint: Checkpoint) -> Facts:
    """Every field of the checkpoint, so that a new one is shown without being named here."""
    facts: Facts = {}
    for item in dataclasses.fields(checkpoint):
        value = getattr(checkpoint, item.name)
        if isinstance(value, JsonFile):
            continue
        if isinstance(value, str) and item.name.endswith("_sha256"):
            value = value[:_DIGEST_LENGTH]
        facts[item.name] = _plain(value)
    return facts


def _plain(value: object) -> object:
    """The value in JSON's types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _model_facts(model: Model) -> Facts:
    shape = model.shape
    return {
        "code": type(model).__module__,
        "hidden_size": shape.hidden_size,
        "layers": shape.num_layers,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "positions": shape.max_positions,
        "causal": shape.causal,
        "windowed": shape.windowed,
        "biased": shape.biased,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _length_facts(checkpoint: Checkpoint, model: Model) -> Facts:
    """The length limit, and which file sets it."""
    limit = length_limit(checkpoint, model)
    if limit != checkpoint.length_limit:
        return {"max_tokens": limit, "max_tokens_from": "config.json (positions)"}
    declared = [(path.name, "max_seq_length") for path in sorted(checkpoint.folder.glob("sentence_*_config.json"))]
    for name, field_name in [*declared, ("tokenizer_config.json", "model_max_length")]:
        if JsonFile.read_optional(checkpoint.folder / name).values.get(field_name) == limit:
            return {"max_tokens": limit, "max_tokens_from": f"{name} ({field_name})"}
    return {"max_tokens": limit, "max_tokens_from": "none of the usual files"}


def _tokenizer_facts(folder: Path) -> Facts:
    """Raises ModelError: no tokenizer, or one that cannot tokenize."""
    path = folder / "tokenizer.json"
    content = read_file(path)
    try:
        tokenizer = load_tokenizer(content)
        encoding = tokenizer.encode(_PROBE)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  # the library raises plain Exception, and its panics are none
        raise ModelError(f"{path}: not a tokenizer: {error}") from None
    tokens = zip(encoding.tokens, encoding.special_tokens_mask, strict=True)
    around = [token if is_special else "…" for token, is_special in tokens]
    return {
        "tokenizer": type(tokenizer.model).__name__,
        "words": len(vocabulary),
        "largest_id": max(vocabulary.values(), default=-1),
        "special_tokens": sum(encoding.special_tokens_mask),
        "text_becomes": [token for token, before in zip(around, [None, *around], strict=False) if token != before],
    }


def _rows(facts: Facts) -> list[str]:
    return [f"{label.replace('_', ' '):{_LABEL_WIDTH}}{_text(value)}" for label, value in facts.items()]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return listed([_text(item) for item in value])
    if value is None or value == "":
        return "none"
    return str(value) if str(value).isprintable() and str(value) == str(value).strip() else json.dumps(value)


def main() -> int:
    """Print what was found; returns the exit status."""
    name, folder, task, form = sys.argv[1:]
    inspection = Inspection.of(name, Path(folder), cast("Task", task))
    text = inspection.to_json() if form == "json" else inspection.to_text()
    # As bytes: a name or a prompt may hold characters that the terminal's encoding, or any encoding, lacks.
    sys.stdout.buffer.write(f"{text}\n".encode(errors="backslashreplace"))
    return 0 if inspection.servable else EX_CONFIG


if __name__ == "__main__":
    sys.exit(main())
