"""The models of a suite: from the arguments of `hedgerow serve` to models, tasks and GPUs. No I/O.

    hedgerow serve A=modelA B=modelB --gpus A:0-1 B:2

Each model has its own scheduler, workers and folder within the run folder. Nothing that happens to one model (a crash,
a full queue, an input in quarantine) reaches another. Only the gateways know all models.

Rejected: one scheduler for all models, since its crash would stop all of them. Also rejected: two models on one GPU.
Neither scheduler could foresee the steps of the other, so its step time predictions would be wrong.

One model is a list of one. The only difference: a single model may have no name here, and then it uses the whole run
folder (`PlannedModel.name`).

This file is at the top of `common`, since `config.py` checks flags with it.
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
    """One model of a suite, as the flags describe it."""

    name: str | None  # for clients; None: the only model, named by --served-model-name or by its files
    reference: str  # a folder, a hub id or a packaged name
    task: str
    gpus: tuple[int, ...] | None  # numbers among the visible GPUs; None: no flag gives any


def plan_models(
    texts: Sequence[str], only: str, *, task: str, gpus: Sequence[str], tasks: Sequence[str]
) -> list[PlannedModel]:
    """The models of a suite, in order: those of `texts`, each NAME=MODEL, or without any texts the model `only`.

    Raises:
        ValueError: a text cannot be read, or the flags contradict each other.
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
    """Whether a text is NAME=MODEL. A folder's path may hold a `=` too, but after a slash."""
    return "=" in text and "/" not in text.partition("=")[0]


def parse_models(texts: Sequence[str]) -> dict[str, str]:
    """The reference of each model (a folder, a hub id, a packaged name) by its name, in order.

    Raises:
        ValueError: a model has no name, an unusable name, or the name of another model.
    """
    models: dict[str, str] = {}
    for text in texts:
        name, _, model = text.partition("=")
        if not is_named(text) or not model:
            raise ValueError(f"{text!r}: with several models each needs a name, as in NAME=MODEL")
        check_name(name)
        if name in models:
            raise ValueError(f"two models are called {name}; give each its own name")
        models[name] = model
    return models


def check_name(name: str) -> None:
    """Raises ValueError: this cannot be the name of a model."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"a model cannot be called {name!r}: use letters, digits, '.', '_' and '-'; begin with a letter or digit"
        )
    if is_reserved(name):
        raise ValueError(
            f"a model cannot be called {name}: the run folder, which gets a folder of that name, has such a file itself"
        )


def parse_tasks(text: str, names: Collection[str], tasks: Sequence[str]) -> dict[str, str]:
    """The task of each model, one of `tasks`. `score` is for all models, `A:embed,B:score` for these two.

    Raises:
        ValueError: the text cannot be read, or names an unknown model.
    """
    usual, own = "auto", {}
    for part in text.split(","):
        name, of_one, task = part.rpartition(":")
        if task not in tasks:
            raise ValueError(f"--task {part!r}: needs one of {', '.join(tasks)}; or NAME:TASK, as in A:{tasks[-1]}")
        if not of_one:
            usual = task
        elif name in names:
            own[name] = task
        else:
            raise ValueError(f"--task {part}: no model is called {name}; there {_list_of(names)}")
    return {name: own.get(name, usual) for name in names}


def parse_gpus(texts: Sequence[str], names: Collection[str]) -> dict[str, list[int]]:
    """The GPU numbers of each model, from texts such as `A:0-1` and `B:2,4`; empty without texts.

    Raises:
        ValueError: a text cannot be read, or names an unknown model. A model or a GPU is named twice. A model has no
            GPU.
    """
    if not texts:
        return {}
    for text in texts:
        if _GPUS.fullmatch(text) is None:
            raise ValueError(
                f"--gpus {text!r}: needs NAME:NUMBERS, as in A:0 or A:0-3,5; give the models before --gpus"
            )
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
                raise ValueError(
                    f"--gpus gives GPU {number} to {owners[number]} and to {name}; a GPU runs one worker only"
                )
            owners[number] = name
    if missing := [name for name in names if name not in gpus]:
        raise ValueError(f"--gpus gives no GPU to {' and '.join(missing)}; add {missing[0]}:NUMBER")
    return gpus


def devices_of(model: PlannedModel, visible: Sequence[str]) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each worker of a model; None if no flag gives it GPUs.

    The number of a GPU is its index in `visible`.

    Raises:
        ValueError: there is no such GPU.
    """
    if model.gpus is None:
        return None
    for number in model.gpus:
        if number >= len(visible):
            raise ValueError(f"--gpus {model.name}:{number}: no GPU {number}; {_visible(len(visible))}")
    return [visible[number] for number in model.gpus]


def _span(text: str, whole: str) -> range:
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise ValueError(f"--gpus {whole}: the range {text} ends before it begins")
    return found


def _visible(count: int) -> str:
    if count == 0:
        return "no GPU is visible"
    return "1 is visible (0)" if count == 1 else f"{count} are visible (0 to {count - 1})"


def _list_of(names: Collection[str]) -> str:
    if not names:
        return "is one model without a name: write NAME=MODEL"
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names)}"
