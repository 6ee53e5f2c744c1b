"""Fields of config.json that several families share, each read and checked in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from worker.models.layers import ACTIVATIONS, Activation
from worker.models.rope import Rope

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile

# What config.json calls a layer whose tokens see their whole sequence, and one whose tokens see those near them.
GLOBAL, LOCAL = "full_attention", "sliding_attention"


def read_activation(config: JsonFile, field: str) -> Activation:
    """Raises ModelError: none is named, or one that `worker.models.layers` does not have."""
    activation = config.text(field)
    if activation is None or activation not in ACTIVATIONS:
        config.refuse(field, f"{activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[activation]


def read_num_heads(config: JsonFile, field: str, hidden_size_field: str) -> int:
    """Raises ModelError: missing, or it does not divide the hidden size."""
    num_heads, hidden_size = config.integer(field), config.integer(hidden_size_field)
    if hidden_size % num_heads:
        config.refuse(field, f"{num_heads} does not divide {hidden_size_field} {hidden_size}.")
    return num_heads


def read_num_kv_heads(config: JsonFile, num_heads: int) -> int:
    """Raises ModelError: missing, or it does not divide the number of query heads."""
    num_kv_heads = config.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        config.refuse("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}.")
    return num_kv_heads


def read_layer_types(config: JsonFile, every_field: str, is_global: Callable[[int, int], bool]) -> tuple[str, ...]:
    """The type of each layer: from `layer_types`, or where that is missing from how often a global one comes.

    Args:
        every_field: the field that says it; `is_global(index, every)` is what it means.

    Raises:
        ModelError: neither is there, or a type is unknown, or there are not as many types as layers.
    """
    num_layers = config.integer("num_hidden_layers")
    layer_types = config.values.get("layer_types")
    if layer_types is None:
        if config.values.get(every_field) is None:
            config.refuse(every_field, "missing, and there is no layer_types either.")
        every = config.integer(every_field)
        return tuple(GLOBAL if is_global(index, every) else LOCAL for index in range(num_layers))
    known = (GLOBAL, LOCAL)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or any(t not in known for t in layer_types):
        config.refuse(
            "layer_types", f"{num_layers} of {' or '.join(map(repr, known))} are needed, not {layer_types!r}."
        )
    return tuple(layer_types)


def read_rope(
    config: JsonFile, layer_type: str, theta_field: str, dim: int, num_positions: int, *, scaled: bool = True
) -> Rope:
    """The rotary positions of layers of one type: from `rope_parameters`, where each type has its own, or from
    `theta_field`; both if they agree. `scaled` says whether `rope_scaling` is meant for this type, too.

    Raises:
        ModelError: the base is missing, something contradicts, or the scaling is one that is not implemented.
    """
    parameters = config.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or not {GLOBAL, LOCAL}.issuperset(parameters):
        config.refuse("rope_parameters", f"a map of {GLOBAL!r} and {LOCAL!r} is needed, not {parameters!r}.")
    own = parameters.get(layer_type)
    if not isinstance(own, dict | None):
        config.refuse("rope_parameters", f"{layer_type}: a map is needed, not {own!r}.")
    theta = None if config.values.get(theta_field) is None else config.positive_number(theta_field)
    own_theta = None if own is None else own.get("rope_theta")
    if theta is None and own_theta is None:
        config.refuse(theta_field, f"missing, and rope_parameters has no rope_theta of {layer_type} either.")
    if theta is not None and own_theta not in (None, theta):
        config.refuse(f"{theta_field}, rope_parameters", f"{layer_type}: they disagree: {theta!r}, {own_theta!r}.")
    scaling = config.values.get("rope_scaling") if scaled else None
    own_fields = {"rope_theta": theta, "rope_parameters": own, "rope_scaling": scaling}
    return Rope.parse(replace(config, values=config.values | own_fields), dim, num_positions)
