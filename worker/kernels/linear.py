"""Matrix products with what follows them fused in: one Triton kernel, three epilogues.

After a product an embedding model does elementwise work, which needs one more launch and moves as many bytes as a fast
product saves. So the epilogue runs on the accumulator, in float32, before anything is rounded:

- plain: bias, activation and residual, each of them optional;
- swiglu: silu(gate) · up. A tile takes half of its rows from the gate and half from the up projection, so that both
  values of one output lie in one tile, and half as much is written;
- rope: RMSNorm over each query and key head, then rotary position embedding. A tile holds whole heads.

A weight is [out, in] as checkpoints have it; a tile's halves (gate and up, or the two halves of a head) are split after
the product. In the layout of the tensor cores' accumulator both halves of a pair belong to one thread, so this moves
nothing, and the loop is that of a plain product: one accumulator, the widest instruction. Rejected: two accumulators
with two products (narrower instructions, which read the shared memory more often), and rows interleaved when a model is
loaded (a second layout of weights that everything else would have to know).

There are three regimes by number of tokens. Below about 128 the weight is streamed once, and the grid must be wide
enough to keep the memory busy: blocks are narrow, or the sum is split among programs (`split_k`). Up to about 1,024,
tiles are cut small enough to occupy all processors. Above, tiles are as large as registers allow. cuBLAS runs where it
is better: in the middle regime, and in all of them if there is no epilogue. `_choose` decides from the shape alone, by
the measurements of `benchmarks/linear.py`. Nothing is timed while serving, and another number of tokens compiles
nothing unless it falls into another regime.

Splitting a sum is deterministic: partial sums go to a workspace, and the last program to arrive adds them up in order.

The file is longer than others since its three epilogues, their tilings and their launch belong to one kernel.

The kernels are for compute capability 9.0 and up where `Tiling.tma` is set, and are tuned for an H200 everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from worker.kernels.activation import ACTIVATIONS, activate
from worker.kernels.launch import launch, pdl_options
from worker.kernels.rotary import qk_norm_rope_
from worker.kernels.swiglu import swiglu
from worker.kernels.swiglu_hopper import is_available, swiglu_linear_hopper

Epilogue = Literal["plain", "swiglu", "rope"]

# Tiles of one product whose sum is split: a counter each. More tiles than this leave no processor to split for.
_MAX_SPLIT_TILES = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut.

    A program computes `block_m` tokens × `block_n` rows of the weight, `block_k` features at a time, `num_stages` of
    them in flight. With `split_k` > 1 that many programs share the features of a tile. `tma` loads through tensor
    descriptors, `persistent` starts one program a processor instead of one a tile, and `warm` asks for the program's
    part of the weight to be brought into the L2 cache while the kernel before still runs. `hopper` prefers the kernel
    of `swiglu_hopper.py`, which cuts as it likes; the rest says what runs where that one is not available.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    group_m: int = 8
    tma: bool = False
    persistent: bool = False
    warm: bool = False
    hopper: bool = False

    def __post_init__(self) -> None:
        if self.split_k > 1 and self.persistent:
            raise ValueError("a persistent grid has nothing to split")
        if self.warm and (self.tma or self.persistent):
            raise ValueError("warming needs the weight's address and a program's one tile")


# Which product runs how: the most tokens that a tiling is for, fewest first; None is the library's product (cuBLAS),
# followed by what would have been the epilogue. From `benchmarks/linear.py` on one H200, 2026-11-29, bfloat16, shapes
# of Qwen3-0.6B, MiniLM, BERT-base and BERT-large. The library multiplies faster than these kernels, by 10 to 20 % when
# the tensor cores are busy and by more at middle sizes; a fused epilogue wins where it saves more than that.
_Rule = tuple[tuple[int, "Tiling | None"], ...]
_ANY = 2**31
_DEEP_SPLIT = (
    (64, Tiling(64, 32, 128, num_warps=4, num_stages=4, split_k=4, warm=True)),
    (128, Tiling(64, 64, 128, num_warps=4, num_stages=4, split_k=4)),
)
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        # 2,048 tokens of Qwen3-0.6B: 30.6 µs against 32.6; 16,384: 249 against 276; 64: 10.1 against 6.6.
        "rope": (
            (256, None),
            (512, Tiling(128, 128, 64, num_warps=8, num_stages=4, tma=True)),
            (_ANY, Tiling(128, 256, 64, num_warps=8, num_stages=4, group_m=16, tma=True, persistent=True)),
        ),
        # 64 tokens of Qwen3-0.6B: 5.9 µs against 7.3; 512: 15.8 against 13.9; 2,048: 40.1 against 48.0, and 34.7 with
        # `swiglu_hopper.py`.
        "swiglu": (
            (64, Tiling(64, 64, 128, num_warps=4, num_stages=4, warm=True)),
            (512, None),
            (1024, Tiling(128, 128, 64, num_warps=8, num_stages=4, tma=True, persistent=True, hopper=True)),
            (_ANY, Tiling(128, 128, 64, num_warps=8, num_stages=3, tma=True, hopper=True)),
        ),
        # Nothing but perhaps a residual, which the library adds in place: there is nothing to save.
        "bare": ((_ANY, None),),
        # At least three times as many features as columns: few tiles, long sums. 64 tokens: 6.3 µs against 7.3.
        "bare deep": (*_DEEP_SPLIT, (_ANY, None)),
        "biased": ((_ANY, None),),
        "biased narrow": (
            (64, Tiling(64, 32, 128, num_warps=4, num_stages=4, warm=True)),
            (256, Tiling(64, 64, 128, num_warps=4, num_stages=4)),
            (_ANY, None),
        ),
        # 64 tokens of BERT-base: 4.7 µs against 6.1; from 256 on the erf costs as much here as in a kernel of its own.
        "activated": (
            (64, Tiling(64, 16, 128, num_warps=4, num_stages=4)),
            (128, Tiling(64, 64, 128, num_warps=4, num_stages=4, warm=True)),
            (_ANY, None),
        ),
        # A bias and a residual. 64 tokens of BERT-large: 7.1 µs against 9.0; 512: 14.1 against 11.4.
        "added": (
            *_DEEP_SPLIT,
            (1024, None),
            (_ANY, Tiling(128, 128, 64, num_warps=8, num_stages=4, tma=True, persistent=True)),
        ),
        "added narrow": (
            (64, Tiling(64, 16, 128, num_warps=4, num_stages=4)),
            (1024, Tiling(64, 64, 128, num_warps=4, num_stages=4)),
            (_ANY, Tiling(128, 128, 64, num_warps=8, num_stages=3, tma=True)),
        ),
    }
)
_NARROW_FEATURES = 512  # MiniLM's 384: the product is so small that the launches around it are what counts


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """activation(x · weightᵀ + bias) + residual.

    Args:
        x: [tokens, features], bfloat16 or float16, as all that follows.
        weight: [columns, features].
        bias: [columns].
        activation: one of `ACTIVATIONS`.
        residual: [tokens, columns]; not to be used afterwards, it may hold the result.
        tiling: instead of what is chosen from the shape.

    Returns [tokens, columns].
    """
    assert activation is None or activation in ACTIVATIONS, activation
    num_columns = weight.shape[0]
    assert bias is None or (bias.shape == (num_columns,) and bias.is_contiguous())
    assert residual is None or (residual.shape == (x.shape[0], num_columns) and residual.is_contiguous())
    tiling = tiling or _choose(_kind_of(weight, bias, activation, residual), x)
    if tiling is None:
        return _library_linear(x, weight, bias, activation, residual)
    out = torch.empty((x.shape[0], num_columns), dtype=x.dtype, device=x.device)
    _launch("plain", x, weight, out, tiling, bias=bias, activation=activation, residual=residual)
    return out


def swiglu_linear(x: torch.Tensor, weight: torch.Tensor, *, tiling: Tiling | None = None) -> torch.Tensor:
    """silu(x · gateᵀ) · (x · upᵀ), where gate is the first half of the weight's rows and up the second.

    Args:
        x: [tokens, features], bfloat16 or float16.
        weight: [2 * columns, features].
        tiling: instead of what is chosen from the shape.

    Returns [tokens, columns].
    """
    assert weight.shape[0] % 2 == 0
    tiling = tiling or _choose("swiglu", x)
    if tiling is None:
        return swiglu(functional.linear(x, weight))
    if tiling.hopper and is_available(x, weight):
        return swiglu_linear_hopper(x, weight)
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch("swiglu", x, weight, out, tiling)
    return out


def qk_norm_rope_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    *,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """The merged query, key and value projection; queries and keys normalised and rotated, values as they are.

    Args:
        x: [tokens, features], bfloat16 or float16.
        weight: [(num_heads + 2 * num_kv_heads) * head_dim, features]: queries, then keys, then values.
        q_norm, k_norm: [head_dim], the weights of RMSNorm over a head.
        cos, sin: float32 [positions, head_dim / 2].
        positions: int32 [tokens], rows of cos and sin.
        num_heads, num_kv_heads: of queries, and of keys as of values.
        epsilon: added to the mean of squares.
        tiling: instead of what is chosen from the shape; `block_n` is a multiple of head_dim.

    Returns [tokens, (num_heads + 2 * num_kv_heads) * head_dim].

    Source: rotation of the two halves of a head as in GPT-NeoX; norm before rotation as in Qwen3.
    """
    head_dim = q_norm.shape[0]
    assert weight.shape[0] == (num_heads + 2 * num_kv_heads) * head_dim
    assert k_norm.shape == q_norm.shape
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape
    assert cos.shape[1] * 2 == head_dim
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert positions.shape == x.shape[:1]
    assert positions.dtype == torch.int32
    tiling = tiling or _choose("rope", x)
    if tiling is None or tiling.block_n % head_dim:
        merged = functional.linear(x, weight)
        qk_norm_rope_(merged, positions, cos, sin, q_norm, k_norm, num_heads, num_kv_heads, epsilon)
        return merged
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(
        "rope",
        x,
        weight,
        out,
        tiling,
        q_norm=q_norm,
        k_norm=k_norm,
        cos=cos,
        sin=sin,
        positions=positions,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        epsilon=epsilon,
    )
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `linear` computes, in float32 and not rounded."""
    y = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual.float()


def swiglu_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `swiglu_linear` computes, in float32 and not rounded."""
    gate, up = functional.linear(x.float(), weight.float()).chunk(2, dim=1)
    return functional.silu(gate) * up


def qk_norm_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
) -> torch.Tensor:
    """What `qk_norm_rope_linear` computes, in float32 and not rounded."""
    head_dim = q_norm.shape[0]
    heads = functional.linear(x.float(), weight.float()).view(x.shape[0], -1, head_dim)  # [tokens, heads, head_dim]
    queries, keys, values = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotated = []
    for part, norm in ((queries, q_norm), (keys, k_norm)):
        first, second = functional.rms_norm(part, (head_dim,), norm.float(), epsilon).chunk(2, dim=2)
        c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)  # [tokens, 1, head_dim / 2]
        rotated.append(torch.cat([first * c - second * s, second * c + first * s], dim=2))
    return torch.cat([*rotated, values], dim=1).flatten(1)


def _kind_of(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, residual: torch.Tensor | None
) -> str:
    """Which of `_RULES` a plain product falls under."""
    num_columns, num_features = weight.shape
    if activation is not None:
        return "activated"
    if bias is None:
        return "bare deep" if num_features >= 3 * num_columns else "bare"
    kind = "biased" if residual is None else "added"
    return f"{kind} narrow" if num_features <= _NARROW_FEATURES else kind


def _choose(kind: str, x: torch.Tensor) -> Tiling | None:
    """How a product runs; None is the library, and on a GPU before Hopper, which nothing here was measured on, always.

    Depends on the number of tokens only through its regime.
    """
    if x.is_cuda and not pdl_options(x)["PDL"]:
        return None
    return next(tiling for most, tiling in _RULES[kind] if x.shape[0] <= most)


def _library_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    if residual is not None and bias is None and activation is None:
        return residual.addmm_(x, weight.T)
    y = functional.linear(x, weight, bias)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y.add_(residual)


def _launch(
    epilogue: Epilogue,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    num_heads: int = 0,
    num_kv_heads: int = 0,
    epsilon: float = 0.0,
) -> None:
    num_tokens, num_features = x.shape
    num_rows = weight.shape[0]
    head_dim = 2 if q_norm is None else q_norm.shape[0]
    assert weight.shape[1] == num_features
    assert x.dtype == weight.dtype
    assert x.is_contiguous()
    assert weight.is_contiguous()
    # Offsets within a tensor are 32 bits wide.
    assert max(x.numel(), weight.numel(), num_tokens * num_rows) < 2**31
    if num_tokens == 0:
        return
    tiles_n = triton.cdiv(num_rows, tiling.block_n)
    num_tiles = triton.cdiv(num_tokens, tiling.block_m) * tiles_n
    num_programs = num_tiles * tiling.split_k
    if tiling.persistent:
        num_programs = min(num_programs, _num_processors(x.device))
    partials = arrivals = None
    if tiling.split_k > 1:
        assert num_tiles <= _MAX_SPLIT_TILES
        # Whole tiles wide: a tile of gate and up is not a range of the weight's rows.
        shape = (tiling.split_k, num_tokens, tiles_n * tiling.block_n)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    pdl = pdl_options(x)
    launch(
        _product,
        (num_programs,),
        _rows(x, tiling.block_m, tiling.block_k) if tiling.tma else x,
        _weight_rows(epilogue, weight, tiling) if tiling.tma else weight,
        out,
        bias,
        residual,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        partials,
        arrivals,
        num_tokens,
        num_rows,
        num_features,
        epsilon,
        EPILOGUE=epilogue,
        ACTIVATION=activation,
        HEAD_DIM=head_dim,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLIT_K=tiling.split_k,
        GROUP_M=tiling.group_m,
        EVEN_K=num_features % tiling.block_k == 0,
        TMA=tiling.tma,
        PERSISTENT=tiling.persistent,
        WARM_CHUNKS=_warm_chunks(tiling, num_features),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl,
    )


def _rows(matrix: torch.Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [num_rows, num_columns])


def _weight_rows(epilogue: Epilogue, weight: torch.Tensor, tiling: Tiling) -> TensorDescriptor:
    if epilogue != "swiglu":
        return _rows(weight, tiling.block_n, tiling.block_k)
    halves = weight.view(2, -1, weight.shape[1])  # [gate and up, columns, features]
    return TensorDescriptor(halves, list(halves.shape), list(halves.stride()), [2, tiling.block_n // 2, tiling.block_k])


def _warm_chunks(tiling: Tiling, num_features: int) -> int:
    """Into how many requests the prefetch of a weight's row is cut: one a thread. 0 for no prefetch.

    A request is for whole 16 bytes, so a program's part of a row has to be cut evenly.
    """
    if not tiling.warm or num_features % (tiling.block_k * tiling.split_k):
        return 0
    num_chunks = max(1, 32 * tiling.num_warps // tiling.block_n)
    return num_chunks if (num_features // tiling.split_k) % (8 * num_chunks) == 0 else 1


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """A zeroed counter for each tile of a product whose sum is split; the kernel leaves them zero.

    One for a device, for good: zeroing a fresh one would be a launch a call. Kernels that use it follow each other on
    one stream. Graphs keep its address, so it must not be allocated within the memory of one.
    """
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing()
    return torch.zeros(_MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _halves(tile: tl.tensor, NUM_TOKENS: tl.constexpr, NUM_GROUPS: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """[tokens, groups * 2 * half] to the first and the second half of each group, [tokens, groups, half] each."""
    grouped = tl.reshape(tile, (NUM_TOKENS, NUM_GROUPS, 2, HALF))
    return tl.split(tl.permute(grouped, (0, 1, 3, 2)))


@triton.jit
def _weight_row(
    column: tl.tensor, tile_n: tl.tensor, num_rows: tl.tensor, EPILOGUE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The weight's row of each column of a tile. Columns beyond the last get the first row; they are never stored."""
    if EPILOGUE == "swiglu":
        half_block: tl.constexpr = BLOCK_N // 2
        within = tile_n * half_block + column % half_block
        num_columns = num_rows // 2
        return (column // half_block) * num_columns + tl.where(within < num_columns, within, 0)
    row = tile_n * BLOCK_N + column
    return tl.where(row < num_rows, row, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    partials: tl.tensor,
    arrivals: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_features: tl.tensor,
    epsilon: tl.tensor,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
    WARM_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """x and weight are pointers, or descriptors of blocks of them with TMA; see `Tiling` and `_launch`."""
    tl.assume(num_features > 0)
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    num_tiles = tiles_m * tl.cdiv(num_rows, BLOCK_N)
    blocks_per_split = tl.cdiv(tl.cdiv(num_features, BLOCK_K), SPLIT_K)

    if PDL:
        # The next kernel may warm its own weight as soon as all programs of this one run.
        tl.extra.cuda.gdc_launch_dependents()
        if WARM_CHUNKS > 0:
            # What `_tile` will read, if there are no more tiles of tokens than GROUP_M: it is for few tokens.
            chunk = num_features // (SPLIT_K * WARM_CHUNKS)
            tile_n = (tl.program_id(0) // SPLIT_K) // tiles_m
            warm_rows = _weight_row(tl.arange(0, BLOCK_N), tile_n, num_rows, EPILOGUE, BLOCK_N)
            starts = (tl.program_id(0) % SPLIT_K) * WARM_CHUNKS + tl.arange(0, WARM_CHUNKS)
            addresses = weight + warm_rows[:, None] * num_features + (starts * chunk)[None, :]
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
                "=r,l,r",
                [addresses, chunk * 2],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        tl.extra.cuda.gdc_wait()

    if PERSISTENT:
        # flatten: the loop over tiles and the one over features become one, so that loads run on across tiles.
        for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
            _tile(
                x, weight, out, bias, residual, q_norm, k_norm, cos, sin, positions, partials, arrivals,
                num_tokens, num_rows, num_features, epsilon, index, 0, blocks_per_split,
                EPILOGUE, ACTIVATION, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS,
                BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, GROUP_M, EVEN_K, TMA,
            )  # fmt: skip
    else:
        _tile(
            x, weight, out, bias, residual, q_norm, k_norm, cos, sin, positions, partials, arrivals,
            num_tokens, num_rows, num_features, epsilon,
            tl.program_id(0) // SPLIT_K, tl.program_id(0) % SPLIT_K, blocks_per_split,
            EPILOGUE, ACTIVATION, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS,
            BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, GROUP_M, EVEN_K, TMA,
        )  # fmt: skip


@triton.jit
def _tile(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, bias: tl.tensor, residual: tl.tensor,
    q_norm: tl.tensor, k_norm: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor,
    partials: tl.tensor, arrivals: tl.tensor, num_tokens: tl.tensor, num_rows: tl.tensor, num_features: tl.tensor,
    epsilon: tl.tensor, index: tl.tensor, split: tl.tensor, blocks_per_split: tl.tensor,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of the output; with SPLIT_K, one part of its sum, and the tile if this part comes last."""
    # Tiles that run at once form a block of GROUP_M tiles high, so that they share rows of x and weight in the L2.
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_in_group = GROUP_M * tl.cdiv(num_rows, BLOCK_N)
    group_m = (index // tiles_in_group) * GROUP_M
    height = tl.minimum(tiles_m - group_m, GROUP_M)
    tile_m = group_m + (index % tiles_in_group) % height
    tile_n = (index % tiles_in_group) // height

    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    first_feature = split * blocks_per_split * BLOCK_K
    stop_feature = num_features
    if SPLIT_K > 1:
        stop_feature = tl.minimum(num_features, first_feature + blocks_per_split * BLOCK_K)
    if not TMA:
        features = tl.arange(0, BLOCK_K)
        # Tokens beyond the last read the first one's row, so that no load needs a mask; they are never stored.
        x_rows = tl.where(tokens < num_tokens, tokens, 0)
        weight_rows = _weight_row(tl.arange(0, BLOCK_N), tile_n, num_rows, EPILOGUE, BLOCK_N)
        x_block = x + x_rows[:, None] * num_features + features[None, :]
        weight_block = weight + weight_rows[:, None] * num_features + features[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for feature in range(first_feature, stop_feature, BLOCK_K):
        if TMA:
            a = x.load([tile_m * BLOCK_M, feature])
            if EPILOGUE == "swiglu":
                b = tl.reshape(weight.load([0, tile_n * (BLOCK_N // 2), feature]), (BLOCK_N, BLOCK_K))
            else:
                b = weight.load([tile_n * BLOCK_N, feature])
        elif EVEN_K:
            a = tl.load(x_block + feature)
            b = tl.load(weight_block + feature)
        else:
            inside = (feature + features < num_features)[None, :]
            a = tl.load(x_block + feature, mask=inside, other=0.0)
            b = tl.load(weight_block + feature, mask=inside, other=0.0)
        acc = tl.dot(a, b.T, acc)

    if SPLIT_K == 1:
        _store(
            acc, out, bias, residual, q_norm, k_norm, cos, sin, positions, num_tokens, num_rows, epsilon, tokens,
            tile_n, EPILOGUE, ACTIVATION, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        # [splits, tokens, columns of all tiles]
        width = tl.cdiv(num_rows, BLOCK_N) * BLOCK_N
        place = partials + tokens[:, None] * width + (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (tokens < num_tokens)[:, None]
        stride = num_tokens * width
        tl.store(place + split * stride, acc, mask=mask, cache_modifier=".cg")
        # All threads of this program have stored before one of them reports it.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + index, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for part in tl.range(SPLIT_K, num_stages=1, loop_unroll_factor=4):
                # .cg: from the L2, where the other programs' sums are; this processor's L1 may hold older ones.
                total += tl.load(place + part * stride, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + index, 0)
            _store(
                total, out, bias, residual, q_norm, k_norm, cos, sin, positions, num_tokens, num_rows, epsilon, tokens,
                tile_n, EPILOGUE, ACTIVATION, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _store(
    acc: tl.tensor, out: tl.tensor, bias: tl.tensor, residual: tl.tensor, q_norm: tl.tensor,
    k_norm: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, num_tokens: tl.tensor,
    num_rows: tl.tensor, epsilon: tl.tensor, tokens: tl.tensor, tile_n: tl.tensor,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """What follows the product, and the store. acc is float32 [tokens, rows of the weight]."""
    token_mask = tokens < num_tokens
    if EPILOGUE == "swiglu":
        half_block: tl.constexpr = BLOCK_N // 2
        gate, up = _halves(acc, BLOCK_M, 1, half_block)
        y = tl.reshape(gate * tl.sigmoid(gate) * up, (BLOCK_M, half_block))
        num_columns = num_rows // 2
        columns = tile_n * half_block + tl.arange(0, half_block)
    else:
        num_columns = num_rows
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)

    if EPILOGUE == "plain":
        y = acc
        column_mask = columns < num_columns
        if bias is not None:
            y += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACTIVATION)
        if residual is not None:
            mask = token_mask[:, None] & column_mask[None, :]
            added = tl.load(residual + tokens[:, None] * num_columns + columns[None, :], mask=mask, other=0.0)
            y += added.to(tl.float32)
    elif EPILOGUE == "rope":
        num_groups: tl.constexpr = BLOCK_N // HEAD_DIM
        half: tl.constexpr = HEAD_DIM // 2
        first, second = _halves(acc, BLOCK_M, num_groups, half)  # [tokens, heads, head_dim / 2]
        heads = tile_n * num_groups + tl.arange(0, num_groups)
        is_query = (heads < NUM_HEADS)[:, None]
        is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[None, :, None]
        within = tl.arange(0, half)[None, :]
        first_norm = tl.where(is_query, tl.load(q_norm + within), tl.load(k_norm + within)).to(tl.float32)
        second_norm = tl.where(is_query, tl.load(q_norm + half + within), tl.load(k_norm + half + within))
        mean = tl.sum(first * first + second * second, axis=2, keep_dims=True) / HEAD_DIM
        scale = tl.rsqrt(mean + epsilon)
        position = tl.load(positions + tokens, mask=token_mask, other=0)
        angle = position[:, None] * half + within  # [tokens, head_dim / 2]
        c = tl.load(cos + angle)[:, None, :]
        s = tl.load(sin + angle)[:, None, :]
        # A value head's factors are 1 and its sine is 0: choosing factors takes fewer registers than choosing results.
        first_factor = tl.where(is_value, 1.0, scale * first_norm[None, :, :])
        second_factor = tl.where(is_value, 1.0, scale * second_norm.to(tl.float32)[None, :, :])
        first *= first_factor
        second *= second_factor
        c = tl.where(is_value, 1.0, c)
        s = tl.where(is_value, 0.0, s)
        rotated_first = first * c - second * s
        rotated_second = second * c + first * s
        joined = tl.permute(tl.join(rotated_first, rotated_second), (0, 1, 3, 2))
        y = tl.reshape(joined, (BLOCK_M, BLOCK_N))

    place = out + tokens[:, None] * num_columns + columns[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=token_mask[:, None] & (columns < num_columns)[None, :])
