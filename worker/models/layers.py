"""The pieces that models are made of: linear layers with what follows them fused in, norms, rotary positions.

Each piece is written once in plain torch operations, for any device and dtype. With half-precision tensors on a CUDA
device it calls the fused kernel of `worker.kernels` that computes the same. The tensors alone decide which of the two
runs: float32 activations always take the plain path, and weights of another dtype are widened on the way. So the same
model, given float32 activations, is its own reference. A missing kernel is an error, not a slower path.

On a CPU a linear layer runs through oneDNN, with its weight packed once in the layout of its kernel. Measured on
2026-11-29 on an AMD EPYC (Zen 5, 2 cores, float32): 110–245 GFLOP/s a core, while `F.linear` (MKL) gives 40–114. On an
Intel Xeon with AVX-512 both give the same, but activation and residual need no pass of their own. The operations are
private to torch (its compiler uses them), so they are not trusted. `pack_linears` compares each layer with `F.linear`.
If one is missing or wrong, it warns and leaves all layers plain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from worker.batch.ragged import RaggedBatch
    from worker.models.rope import Rope

logger = logging.getLogger(__name__)

# The number of rows that a packed weight is laid out for. Any number runs; 16 or 512 made no difference (2026-11-29).
_PACKED_FOR_ROWS = 512

# Largest error that a packed layer may have, relative to its largest output: rounding of another order of summation.
_TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 2e-2})

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of one variable, and what the kernels and oneDNN call it."""

    function: Callable[[torch.Tensor], torch.Tensor]
    kernel_name: str
    fused_name: str
    fused_algorithm: str


_GELU = Activation(functional.gelu, "gelu", "gelu", "none")
_GELU_TANH = Activation(lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh", "gelu", "tanh")
_RELU = Activation(functional.relu, "relu", "relu", "")
_SILU = Activation(functional.silu, "silu", "swish", "")

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

    def __init__(
        self, in_features: int, out_features: int, activation: Activation | None = None, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self._activation = activation
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, in_features], residual [tokens, out_features] → [tokens, out_features].

        The residual is not to be used afterwards: its memory may hold the result.
        """
        if self._packed is not None:
            return self._run_packed(x, residual)
        if is_fusible(x, self.weight):
            from worker.kernels.linear import linear

            name = None if self._activation is None else self._activation.kernel_name
            return linear(x, self.weight, self.bias, name, residual)
        return self._run_plain(x, residual)

    def pack(self) -> float:
        """Use oneDNN from now on. Returns the largest error against `F.linear`, relative to the largest output."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR_ROWS)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(5, self.weight.shape[1], generator=generator).to(self.weight.dtype)
        residual = None
        if self._activation is None:
            residual = torch.randn(5, self.weight.shape[0], generator=generator).to(self.weight.dtype)
        plain = self._run_plain(x, residual).float()
        error = (self(x, residual).float() - plain).abs().max() / plain.abs().max().clamp_min(1e-30)
        if residual is not None:
            plain = self._run_plain(x, None).float()
            error = torch.maximum(error, (self(x).float() - plain).abs().max() / plain.abs().max().clamp_min(1e-30))
        return float(error)

    def unpack(self) -> None:
        self._packed = None

    def release_weight(self) -> None:
        """Drop the plain weight of a packed layer: half the memory."""
        assert self._packed is not None
        self.weight = parameter(0, 0)

    def _run_packed(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is not None:
            added: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
            return added
        name, algorithm = "none", ""
        if self._activation is not None:
            name, algorithm = self._activation.fused_name, self._activation.fused_algorithm
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, name, [], algorithm)
        return y

    def _run_plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = functional.linear(x, self.weight.to(x.dtype), bias)
        if self._activation is not None:
            y = self._activation.function(y)
        return y if residual is None else y + residual


class LayerNorm(nn.Module):
    """Zero mean and unit variance of each row, then a scale and perhaps a shift of each column.

    Source: Ba, Kiros, Hinton, Layer Normalization (2016).
    """

    def __init__(self, size: int, epsilon: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.bias = parameter(size) if bias else None
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x + residual, both [tokens, size], in the dtype of x."""
        if is_fusible(x, self.weight):
            from worker.kernels.norm import add_layer_norm, layer_norm

            if residual is not None:
                return add_layer_norm(x, residual, self.weight, self.bias, self.epsilon)
            return layer_norm(x, self.weight, self.bias, self.epsilon)
        if residual is not None:
            x = x + residual
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        return functional.layer_norm(x, weight.shape, weight, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Unit mean square of each row, then a scale of each column: by weight + offset, added in float32.

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization (2019); the offset is Gemma's, 1.
    """

    def __init__(self, size: int, epsilon: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.epsilon = epsilon
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], normed over the last axis; on a CUDA device in half precision [tokens, size]."""
        if is_fusible(x, self.weight):
            from worker.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.epsilon, self.offset)
        weight = self.scale().to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, self.epsilon)

    def scale(self) -> torch.Tensor:
        """What the columns are multiplied by; with an offset in float32, [size]."""
        return self.weight.float() + self.offset if self.offset else self.weight


class GatedMlp(nn.Module):
    """down(act(gate(x)) · up(x)) + residual, gate and up from one merged product.

    Source: Shazeer, GLU Variants Improve Transformer (2020), SwiGLU and GEGLU.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation = _SILU,
        *,
        bias: bool = False,
        down_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=down_bias)
        self._activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Both [tokens, hidden] → [tokens, hidden]."""
        gate_up = self.gate_up
        if not is_fusible(x, gate_up.weight):
            gate, up = gate_up(x).chunk(2, dim=1)
            inner = self._activation.function(gate) * up  # [tokens, intermediate]
        elif self._activation is _SILU and gate_up.bias is None:
            from worker.kernels.linear import swiglu_linear

            inner = swiglu_linear(x, gate_up.weight)
        else:
            from worker.kernels.swiglu import gated

            inner = gated(gate_up(x), self._activation.kernel_name)
        output: torch.Tensor = self.down(inner, residual)
        return output


class RotaryTable(nn.Module):
    """Cosines and sines of every position's angles, float32 [positions, dim / 2] whatever the model computes in.

    Made on the CPU whichever the device: the angles of late positions are thousands of radians, where the last bit of
    a frequency, which another device's power function may round differently, shows in the third decimal of a cosine.

    With dynamic scaling the table ends with the trained length. A longer text's angles depend on how long it is, so
    they are computed with each batch, from frequencies that were made here for every length; a text that is not longer
    takes the table's rows, to the bit, whatever it is in a batch with.

    On the meta device, which holds shapes alone, nothing is made: it asks for no memory, whatever config.json says.

    Source: Su et al., RoFormer (2021); float32 throughout, as in transformers, so that late positions agree with it.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    frequencies: torch.Tensor | None  # [lengths, dim / 2], of texts as long as the table, a token longer, and so on

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        make = _rotary_shapes if torch.get_default_device().type == "meta" else _rotary_tables
        for name, table in zip(("cos", "sin", "frequencies"), make(rope), strict=True):
            self.register_buffer(name, table, persistent=False)

    def at(self, batch: RaggedBatch) -> Rotation:
        """The rotation of each token of a batch, for all layers that turn alike."""
        if self.frequencies is None:
            return Rotation(self.cos, self.sin, batch.positions)
        return self._by_length(batch, self.frequencies)

    def _by_length(self, batch: RaggedBatch, frequencies: torch.Tensor) -> Rotation:
        """A row a token. No shape and no host decision depends on lengths: this is captured into graphs."""
        longest = len(self.cos)
        # A dummy that fills up a batch may be longer than any text.
        excess = (batch.token_stops - batch.token_starts - longest).clamp(0, len(frequencies) - 1)
        angles = batch.positions.float()[:, None] * frequencies.index_select(0, excess)  # [tokens, dim / 2]
        is_longer, rows = (excess > 0)[:, None], batch.positions.clamp_max(longest - 1)
        return Rotation(
            torch.where(is_longer, angles.cos(), self.cos.index_select(0, rows)),
            torch.where(is_longer, angles.sin(), self.sin.index_select(0, rows)),
            torch.arange(len(rows), dtype=torch.int32, device=rows.device),
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryTable:
        # Converting a whole model to another dtype only moves these tables: bfloat16 cannot tell positions apart.
        super()._apply(lambda table: table.to(fn(table).device), recurse)
        return self


def _rotary_tables(rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `RotaryTable` holds."""
    device = torch.get_default_device()
    frequencies = rope.frequencies_by_length()
    positions = torch.arange(_num_angles(rope), dtype=torch.float32, device="cpu")
    angles = positions[:, None] * rope.inverse_frequencies()  # [positions, dim / 2]
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(device), sin.to(device), None if frequencies is None else frequencies.to(device)


def _rotary_shapes(rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same without numbers, on the meta device."""
    shapes = [(num_rows, rope.dim // 2) for num_rows in (_num_angles(rope), _num_angles(rope), rope.num_lengths)]
    cos, sin, frequencies = (torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes)
    return cos, sin, frequencies if rope.num_lengths else None


def _num_angles(rope: Rope) -> int:
    return rope.num_positions + 1 - rope.num_lengths if rope.num_lengths else rope.num_positions


def rotations_at(tables: nn.ModuleDict, batch: RaggedBatch) -> dict[str, Rotation]:
    """The rotation of each token of a batch, by the name of the `RotaryTable`."""
    rotations = {}
    for name, table in tables.items():
        assert isinstance(table, RotaryTable)
        rotations[name] = table.at(batch)
    return rotations


class Rotation:
    """The angles of a batch: rows of two tables. Kernels look them up themselves; else they are looked up once."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
        """float32 [positions, dim / 2] twice, int32 [tokens]: the rows."""
        self.cos = cos
        self.sin = sin
        self.positions = positions
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, heads, dim], column i turned together with column i + dim / 2."""
        if self._rows is None:
            cos, sin = (table.index_select(0, self.positions).unsqueeze(1) for table in (self.cos, self.sin))
            self._rows = cos, sin  # [tokens, 1, dim / 2]
        cos, sin = self._rows
        first, second = x.chunk(2, dim=2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)


class RotaryQkv(nn.Module):
    """Queries, keys and values from one merged product; queries and keys perhaps normed over each head, then turned by
    their positions."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        epsilon: float | None = None,
        norm_offset: float = 0.0,
    ) -> None:
        """`epsilon` is of the norms over heads; None: there are none. `norm_offset` as of `RMSNorm`."""
        super().__init__()
        self.projection = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.q_norm = None if epsilon is None else RMSNorm(head_dim, epsilon, offset=norm_offset)
        self.k_norm = None if epsilon is None else RMSNorm(head_dim, epsilon, offset=norm_offset)
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim

    def forward(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens, hidden] → [tokens, heads, head_dim], twice [tokens, kv heads, head_dim]: views of one tensor."""
        if is_fusible(x, self.projection.weight):
            return self._split(self._run_fused(x, rotation))
        query, key, value = self._split(self.projection(x))
        # Rounded once, at the end, as in the kernel.
        for part, norm in ((query, self.q_norm), (key, self.k_norm)):
            whole = part.float()
            part.copy_(rotation.rotate(whole if norm is None else norm(whole)))
        return query, key, value

    def _run_fused(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        heads = self._num_heads, self._num_kv_heads
        if self.q_norm is None or self.k_norm is None:
            from worker.kernels.rotary import rope_

            merged: torch.Tensor = self.projection(x)
            rope_(merged, rotation.positions, rotation.cos, rotation.sin, *heads)
            return merged
        norms = self.q_norm.weight, self.k_norm.weight
        if self.projection.bias is None and not self.q_norm.offset:
            from worker.kernels.linear import qk_norm_rope_linear

            return qk_norm_rope_linear(
                x,
                self.projection.weight,
                *norms,
                rotation.cos,
                rotation.sin,
                rotation.positions,
                *heads,
                self.q_norm.epsilon,
            )
        from worker.kernels.rotary import qk_norm_rope_

        merged = self.projection(x)
        qk_norm_rope_(
            merged,
            rotation.positions,
            rotation.cos,
            rotation.sin,
            *norms,
            *heads,
            self.q_norm.epsilon,
            self.q_norm.offset,
        )
        return merged

    def parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of the merged weight, or of its bias, that make queries, keys and values."""
        query, kv = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        queries, keys, values = torch.split(tensor, [query, kv, kv])
        return queries, keys, values

    def _split(self, merged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = merged.view(merged.shape[0], -1, self._head_dim)
        query, key, value = torch.split(heads, [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        return query, key, value


class Embedding(nn.Module):
    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = parameter(num_rows, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 [tokens] → [tokens, size], in the dtype of the table."""
        if is_fusible(self.weight, self.weight):
            from worker.kernels.embedding import embed

            return embed(ids, self.weight)
        return functional.embedding(ids, self.weight)


def parameter(*shape: int) -> nn.Parameter:
    """A parameter that is yet to be filled, and never trained."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def tensors_of(prefix: str, layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a layer as checkpoints call them: `weight` and, where there is one, `bias` after its name."""
    return {f"{prefix}.{name}": tensor for name, tensor in layer.named_parameters()}


def is_fusible(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels take these: both in the same half precision on a CUDA device."""
    return x.is_cuda and x.dtype == weight.dtype and x.dtype in _KERNEL_DTYPES


def pack_linears(model: nn.Module) -> bool:
    """Let all linear layers of a CPU model use oneDNN if it computes what `F.linear` does; whether they use it."""
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
