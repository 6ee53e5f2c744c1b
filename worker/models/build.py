"""From config.json to a model whose parameters are yet to be filled."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from worker.checkpoint.architectures import FAMILIES, check_architecture
from worker.checkpoint.scoring import is_classifier
from worker.models.interface import Model

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile


def build(architecture: str, config: JsonFile) -> Model:
    """The model that config.json describes, its parameters yet to be filled; a classifier's is a `Scorer`.

    Raises:
        ModelError: the architecture, or something in its configuration, is not supported.
    """
    check_architecture(architecture, config)
    family = importlib.import_module(f"worker.models.families.{FAMILIES[architecture]}")
    body = cast("Model", family.build(architecture, config))
    if not is_classifier(architecture):
        return body
    from worker.models.heads import Scorer, build_head

    return Scorer(body, build_head(architecture, config, body.shape.hidden_size))
