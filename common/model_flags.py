"""What a suite's models are: from the words of `hedgerow serve` to models, tasks and devices. No I/O.

    hedgerow serve A=modelA B=modelB --gpus A:0-1 B:2

Each model has a scheduler, workers and a folder of its own within the run folder, so that to them a suite of several
models is as many suites of one: nothing that befalls a model (a death, a full queue, an input in quarantine) is known
to another. The gateways alone know of all. Rejected: one scheduler for all, which would have to keep apart what is
apart by itself, and whose death would be everybody's; two models on one GPU, whose steps would take turns that neither
scheduler can foresee, so that what each has learned of its own steps would be wrong.

One model is a list of one. It differs from the others in this alone: it may have no name here, and then the whole run
folder is its (`PlannedModel.name`).

At the top of `common`, since `config.py` refuses flags by it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.run_dir import is_reserved

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GPUS = re.compile(r".+:\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model of a suite, as the flags name it."""

    name: str | None  # what clients call it; None: it is the only one, and called as its files or another flag say
    reference: str  # a folder, a hub id or a packaged name
    task: str
    gpus: tuple[int, ...] | None  # numbers among those that are visible; None: no flag says


def plan_models(
    texts: Sequence[str], only: str, *, task: str, gpus: Sequence[str], tasks: Sequence[str]
) -> list[PlannedModel]:
    """The models of a suite in their order: those of `texts`, each a NAME=MODEL, or without any `only` that one.

    Raises:
        ValueError: a text cannot be read, or they do not fit each other.
    """
    named = parse_models(texts)
    models: list[tuple[str | None, str]] = [*named.items()] or [(None, only)]
    task_of = parse_tasks(task, [name or reference for name, reference in models], tasks)
    gpus_of = {name: tuple(numbers) for name, numbers in parse_gpus(gpus, named).items()}
    return [
        PlannedModel(name, reference, task_of[name or reference], gpus_of.get(name) if name else None)
        for name, reference in models
    ]


def is_named(text: str) -> bool:
    """Whether a model is given as NAME=MODEL; a folder with a `=` in its path has a slash before it."""
    return "=" in text and "/" not in text.partition("=")[0]


def parse_models(texts: Sequence[str]) -> dict[str, str]:
    """What each model is (a folder, a hub id, a packaged name), by the name that clients use, in order.

    Raises:
        ValueError: one has no name, or none that can be used, or another one's.
    """
    models: dict[str, str] = {}
    for text in texts:
        name, _, model = text.partition("=")
        if not is_named(text) or not model:
            raise ValueError(f"{text!r}: of several models each needs a name, as in NAME=MODEL")
        check_name(name)
        if name in models:
            raise ValueError(f"two models are called {name}; give each a name of its own")
        models[name] = model
    return models


def check_name(name: str) -> None:
    """Raises ValueError where a model cannot be called so."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"a model cannot be called {name!r}: letters, digits, '.', '_' and '-', the first no sign")
    if is_reserved(name):
        raise ValueError(
            f"a model cannot be called {name}: the run folder, where it has its own, uses such names itself"
        )


def parse_tasks(text: str, names: Collection[str], tasks: Sequence[str]) -> dict[str, str]:
    """What each model is for, which is one of `tasks`: of `score` all are for that, of `A:embed,B:score` these two.

    Raises:
        ValueError: it cannot be read, or names no model.
    """
    usual, own = "auto", {}
    for part in text.split(","):
        name, of_one, task = part.rpartition(":")
        if task not in tasks:
            raise ValueError(f"--task {part!r}: needs one of {', '.join(tasks)}, or NAME:TASK, as in A:{tasks[-1]}")
        if not of_one:
            usual = task
        elif name in names:
            own[name] = task
        else:
            raise ValueError(f"--task {part}: no model is called {name}; there {_list_of(names)}")
    return {name: own.get(name, usual) for name in names}


def parse_gpus(texts: Sequence[str], names: Collection[str]) -> dict[str, list[int]]:
    """The numbers of each model's GPUs, of `A:0-1 B:2,4`; of no texts none.

    Raises:
        ValueError: a text cannot be read, names no model or one for the second time, gives a GPU twice; or a model has
            none.
    """
    if not texts:
        return {}
    for text in texts:
        if _GPUS.fullmatch(text) is None:
            raise ValueError(f"--gpus {text!r}: needs NAME:NUMBERS, as in A:0 or A:0-3,5; models stand before --gpus")
    gpus: dict[str, list[int]] = {}
    owners: dict[int, str] = {}
    for text in texts:
        name, _, numbers = text.rpartition(":")
        if name not in names:
            raise ValueError(f"--gpus {text}: no model is called {name}; there {_list_of(names)}")
        if name in gpus:
            raise ValueError(f"--gpus names {name} twice; give all of its GPUs at once, as in {name}:0-1,3")
        gpus[name] = [number for span in numbers.split(",") for number in _span(span, text)]
        for number in gpus[name]:
            if number in owners:
                raise ValueError(f"--gpus gives GPU {number} to {owners[number]} and to {name}; a GPU has one worker")
            owners[number] = name
    if missing := [name for name in names if name not in gpus]:
        raise ValueError(f"--gpus has none for {' and '.join(missing)}; add {missing[0]}:NUMBER")
    return gpus


def devices_of(model: PlannedModel, visible: Sequence[str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES is for a model's workers; None where no flag says which GPUs are its.

    A GPU's number is its place among those that are visible.

    Raises:
        ValueError: there is no such GPU.
    """
    if model.gpus is None:
        return None
    for number in model.gpus:
        if number >= len(visible):
            there = f"are {len(visible)}, from 0" if len(visible) > 1 else "is one, 0" if visible else "is none"
            raise ValueError(
                f"--gpus {model.name}:{number}: there is no such GPU; of those that may be used there {there}"
            )
    return [visible[number] for number in model.gpus]


def _span(text: str, whole: str) -> range:
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise ValueError(f"--gpus {whole}: {text} ends before it begins")
    return found


def _list_of(names: Collection[str]) -> str:
    if not names:
        return "is one model without a name: write NAME=MODEL"
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names)}"
