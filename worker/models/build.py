"""From config.json to a model whose parameters are yet to be filled."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from worker.checkpoint.architectures import ARCHITECTURES
from worker.models.interface import Model

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile


def build(architecture: str, config: JsonFile) -> Model:
    """The model that config.json describes, its parameters yet to be filled; a classifier's is a `Scorer`.

    Args:
        architecture: a name of the table of architectures.

    Raises:
        ModelError: something in the configuration is not supported.
    """
    row = ARCHITECTURES[architecture]
    family = importlib.import_module(f"worker.models.families.{row.family}")
    body = cast("Model", family.build(architecture, config))
    if row.score_head is None:
        return body
    from worker.models.heads import Scorer, build_head

    return Scorer(body, build_head(row.score_head, config, body.shape.hidden_size))
