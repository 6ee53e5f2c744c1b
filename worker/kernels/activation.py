"""The activation functions by the kernels' names for them, each as plain torch and as a part of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
    }
)


@triton.jit
def activate(y: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """One of `ACTIVATIONS` of every element, float32; None: y as it is."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2u.
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # the maximum of NaN and 0 would be 0
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y
