"""The pieces that models are made of: linear layers with what follows them fused in, and activations.

On a CPU a linear layer runs through oneDNN with its weight packed once, in the layout of its kernel. Measured on
2026-11-29 on an AMD EPYC (Zen 5, 2 cores, float32): 110–245 GFLOP/s a core where `F.linear` (MKL) gives 40–114; on an
Intel Xeon with AVX-512 both give the same, and what remains is that activation and residual cost no pass of their own.
The operations are private to torch (its compiler uses them), so they are not trusted: `pack_linears` compares each
layer with `F.linear` and, where one is missing or wrong, warns and leaves all of them plain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

logger = logging.getLogger(__name__)

# What a packed layer's weight is laid out for; any number of rows runs. 16 or 512 made no difference (2026-11-29).
_PACKED_FOR_ROWS = 512

# Largest error that a packed layer may have, relative to its largest output: rounding of another order of summation.
_TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 2e-2})


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of one variable, and what oneDNN calls it."""

    function: Callable[[torch.Tensor], torch.Tensor]
    fused_name: str
    fused_algorithm: str


_GELU = Activation(functional.gelu, "gelu", "none")
_GELU_TANH = Activation(lambda x: functional.gelu(x, approximate="tanh"), "gelu", "tanh")
_RELU = Activation(functional.relu, "relu", "")
_SILU = Activation(functional.silu, "swish", "")

# By the names of the checkpoints' config.json.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": _GELU,
        "gelu_python": _GELU,
        "gelu_new": _GELU_TANH,
        "gelu_fast": _GELU_TANH,
        "gelu_pytorch_tanh": _GELU_TANH,
        "relu": _RELU,
        "silu": _SILU,
        "swish": _SILU,
    }
)


class Linear(nn.Module):
    """x · weightᵀ + bias, then the activation, then the residual added. A layer has one of the latter two at most."""

    def __init__(self, in_features: int, out_features: int, activation: Activation | None = None) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features)
        self._activation = activation
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, in_features], residual [tokens, out_features] → [tokens, out_features]."""
        if self._packed is None:
            return self._plain(x, residual)
        if residual is not None:
            added: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
            return added
        name, algorithm = "none", ""
        if self._activation is not None:
            name, algorithm = self._activation.fused_name, self._activation.fused_algorithm
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, name, [], algorithm)
        return y

    def pack(self) -> float:
        """Use oneDNN from now on. Returns the largest error against `F.linear`, relative to the largest output."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR_ROWS)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(5, self.weight.shape[1], generator=generator).to(self.weight.dtype)
        residual = None
        if self._activation is None:
            residual = torch.randn(5, self.weight.shape[0], generator=generator).to(self.weight.dtype)
        plain = self._plain(x, residual).float()
        error = (self(x, residual).float() - plain).abs().max() / plain.abs().max().clamp_min(1e-30)
        if residual is not None:
            plain = self._plain(x, None).float()
            error = torch.maximum(error, (self(x).float() - plain).abs().max() / plain.abs().max().clamp_min(1e-30))
        return float(error)

    def unpack(self) -> None:
        self._packed = None

    def release_weight(self) -> None:
        """Drop the plain weight of a packed layer: half the memory."""
        assert self._packed is not None
        self.weight = parameter(0, 0)

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if self._activation is not None:
            y = self._activation.function(y)
        return y if residual is None else y + residual


class LayerNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.bias = parameter(size)
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._epsilon)


class Embedding(nn.Module):
    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = parameter(num_rows, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


def parameter(*shape: int) -> nn.Parameter:
    """A parameter that is yet to be filled, and never trained."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def pack_linears(model: nn.Module) -> bool:
    """Let all linear layers of a CPU model use oneDNN, if it computes what `F.linear` does; whether they do."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    try:
        for linear in linears:
            error = linear.pack()
            tolerance = _TOLERANCES[linear.weight.dtype]
            if not error <= tolerance:
                raise RuntimeError(f"error {error:.1e} where at most {tolerance:.0e} is rounding")  # noqa: TRY301
    except (AttributeError, RuntimeError, TypeError) as error:
        # Another torch, another processor: the operation is gone, or wrong.
        logger.warning("oneDNN's packed linear layers are not usable, plain ones run instead (slower): %s", error)
        for linear in linears:
            linear.unpack()
        return False
    for linear in linears:
        linear.release_weight()
    return True
