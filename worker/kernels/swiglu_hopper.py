"""The gated product of an MLP for many tokens on Hopper: silu(x · gateᵀ) · (x · upᵀ) with its warps specialised.

This product costs more than any other of a model. `linear.py` leaves the work of a tile to the compiler, which lets all
warps load, multiply and finish together: while they finish, the tensor cores idle. Here a program's warps have roles.
One warp asks the tensor memory accelerator (TMA) for the operands, `num_stages` blocks of features ahead and on into
the next tile. Two groups of four warps (warpgroups) multiply 64 tokens each. They share the weight's blocks but need
not keep step, so one multiplies while the other is in its epilogue. A group's accumulator fills its registers, which
the loading warp gives up: 240 a thread against 24. Programs are persistent, one for each processor.

A tile's halves, gate and up, are one product with the widest instruction, as in `linear.py`: both values of an output
lie in one thread. The result leaves through shared memory and TMA, which also keeps to the bounds: rows beyond the last
token are read as zeros and not written, so any number of tokens is right.

One H200, 2026-11-29, bfloat16, gate and up of Qwen3-0.6B, µs; cuBLAS multiplies alone, without what follows:

    tokens                                      1,024    2,048    4,096    16,384
    this, as `_tiling_for` chooses               19.8     34.7     68.9     304.4
    the best tiling of `linear.py`               22.7     42.8     79.3     349.0
    cuBLAS                                       19.8     38.7     73.7     314.6

The first of these is with the sigmoid as an exponential and an approximate division, the others as `_silu` has it.

Rejected, µs for 2,048 and for 16,384 tokens, to be compared with 36.1 and 316.3, as all have that other sigmoid or
Triton's: eight warps that all load and multiply, software pipelined (41.1, 382.2); that left to Triton, with loops
flattened and the result stored in halves (41.2, 336.2); blocks of 32 features in 8 stages (37.1, 322.0); groups of 8
tiles of tokens rather than 16 (36.6, 318.0). The same kernel with the epilogues of the other products: with rotary
embedding it is as fast as `linear.py` (30.9 against 30.9, 246 against 249), and cuBLAS is faster than both at a plain
product.

It is written in Gluon because Triton's own language cannot say which warp does what, and is for one generation: the
instructions it is made of (wgmma) exist in compute capability 9.0 alone. Gluon is experimental and changes between
releases, so `is_available` vouches for those that the tests compile it with; elsewhere `linear.py` runs its own kernel.

Sources: roles, stages and the hand-over of registers as in CUTLASS's "ping-pong" and "cooperative" kernels for Hopper;
the language as in Triton's Gluon tutorials, "warp specialization" and "persistent kernels".
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # another Triton: the kernel below cannot be compiled, and `is_available` says so
    gluon = None

from worker.kernels.launch import launch

logger = logging.getLogger(__name__)

# Releases of Triton whose compiler takes the kernel (the tests' sm_90 build); 3.6 is what was measured.
_TRITON_RELEASES = ("3.6", "3.7")

_BLOCK_M = 128  # tokens of a tile: 64, the rows of a wgmma, for each of two warpgroups
_BLOCK_K = 64  # features of a block: 128 bytes, the widest that shared memory is swizzled by
_GROUP_M = 16  # tiles that run at once are this many tiles of tokens high, so that they share rows of the weight in L2
_CAPABILITY = (9, 0)

# Options of the compiler. `num_warps` are the first warpgroup that multiplies; the second and the warp that loads come
# on top and are rounded up to two warpgroups, so 384 threads start with 168 registers each, all that a processor has.
# `launch_pdl`: like all kernels it may start before the one in front of it has ended, see `_product` and `launch.py`.
_OPTIONS: Mapping[str, int] = MappingProxyType({"num_warps": 4, "maxnreg": 168, "launch_pdl": True})


@dataclass(frozen=True, slots=True)
class _Tiling:
    """`block_n` rows of the weight to a tile, half of them gate and half up; `num_stages` blocks of features loaded.

    As many stages as fit, beside the staged result, into the 227 KiB of shared memory.
    """

    block_n: int
    num_stages: int


# Up to 1,024 tokens tiles of the full width are too few to occupy all processors evenly: 23.5 µs against 19.8.
_NARROW_TOKENS = 1024
_NARROW = _Tiling(block_n=128, num_stages=6)
_WIDE = _Tiling(block_n=256, num_stages=4)


def is_available(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `swiglu_linear_hopper` can run on these, for any number of tokens; shapes and dtypes as it says.

    If only the installed Triton is in the way, the log says so, once.
    """
    return (
        x.is_cuda
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % _BLOCK_K == 0
        and weight.shape[0] % _WIDE.block_n == 0
        and _runs_on(x.get_device())
    )


def swiglu_linear_hopper(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) · (x · upᵀ), where gate is the first half of the weight's rows and up the second.

    The first call for a dtype and a tiling compiles, which takes seconds.

    Args:
        x: [tokens, features], bfloat16 or float16, contiguous; features a multiple of 64.
        weight: [2 * columns, features], of the same dtype, contiguous; columns a multiple of 128.

    Returns [tokens, columns].
    """
    num_tokens, num_features = x.shape
    num_columns = weight.shape[0] // 2
    assert is_available(x, weight)
    assert weight.shape[1] == num_features
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty((num_tokens, num_columns), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    tiling = _tiling_for(num_tokens)
    num_tiles = triton.cdiv(num_tokens, _BLOCK_M) * (num_columns // (tiling.block_n // 2))
    num_processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    layout = _shared_layout()
    launch(
        _product,
        (min(num_tiles, num_processors),),
        TensorDescriptor.from_tensor(x, [_BLOCK_M // 2, _BLOCK_K], layout),
        TensorDescriptor.from_tensor(weight, [tiling.block_n // 2, _BLOCK_K], layout),
        TensorDescriptor.from_tensor(out, [_BLOCK_M // 2, tiling.block_n // 2], layout),
        num_tokens,
        num_columns,
        num_features,
        STAGES=tiling.num_stages,
        GROUP_M=_GROUP_M,
        **_OPTIONS,
    )
    return out


def _tiling_for(num_tokens: int) -> _Tiling:
    return _NARROW if num_tokens <= _NARROW_TOKENS else _WIDE


def _shared_layout() -> gl.NVMMASharedLayout:
    """The layout of every block in shared memory: rows of 64 values, or several such side by side."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * _BLOCK_K, element_bitwidth=16, rank=2)


@functools.cache  # facts about the hardware and the installation; the log gets one line for a device
def _runs_on(device_index: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) != _CAPABILITY:
        return False
    if not _has_gluon():
        logger.warning(
            "Triton %s has no Gluon that was tested (%s have): gated products of many tokens run some 15 %% slower",
            triton.__version__,
            ", ".join(_TRITON_RELEASES),
        )
        return False
    return True


def _has_gluon() -> bool:
    return gluon is not None and ".".join(triton.__version__.split(".")[:2]) in _TRITON_RELEASES


def _jit(function: Callable[..., object]) -> Callable[..., object]:
    """A kernel or a part of one, not specialised on the number of tokens; as it is where there is no Gluon."""
    return function if gluon is None else gluon.jit(function, do_not_specialize=["num_tokens"])


@_jit
def _product(
    x: tma.tensor_descriptor,  # blocks of [64 tokens, 64 features]
    weight: tma.tensor_descriptor,  # blocks of half a tile's rows: [block_n / 2, 64 features]
    out: tma.tensor_descriptor,  # blocks of [64 tokens, block_n / 2 columns]
    num_tokens: gl.tensor,
    num_columns: gl.tensor,
    num_features: gl.tensor,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> None:
    """The roles, and what they share: each stage is `full` once its bytes have arrived, `empty` once both have read it.

    Rule 1 of `launch.py`: the kernel's own warps wait, and the other roles start after that.
    """
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    HALF_N: gl.constexpr = weight.block_shape[0]
    gdc_launch_dependents()
    # A stage's tokens in two blocks, one a consumer; its weight in two, gate and up, which are multiplied as one.
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES * 2, ROWS, BLOCK_K], x.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, HALF_N * 2, BLOCK_K], x.layout)
    halves = rows._reinterpret(x.dtype, [STAGES * 2, HALF_N, BLOCK_K], x.layout)
    staging = gl.allocate_shared_memory(x.dtype, [2, ROWS, HALF_N], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    tiles_m = gl.cdiv(num_tokens, ROWS * 2)
    tiles_n = num_columns // HALF_N
    num_blocks = num_features // BLOCK_K
    gdc_wait()
    gl.warp_specialize(
        [
            (_consume, (tokens, rows, full, empty, staging, out, tiles_m, tiles_n, num_blocks, 0, STAGES, GROUP_M)),
            (_consume, (tokens, rows, full, empty, staging, out, tiles_m, tiles_n, num_blocks, 1, STAGES, GROUP_M)),
            (
                _produce,
                (x, weight, tokens, halves, full, empty, tiles_m, tiles_n, num_blocks, num_columns, STAGES, GROUP_M),
            ),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers a thread of theirs; the first consumer gets what is left, as many as the second
    )


@_jit
def _produce(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    tokens: gl.shared_memory_descriptor,
    halves: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    empty: gl.shared_memory_descriptor,
    tiles_m: gl.tensor,
    tiles_n: gl.tensor,
    num_blocks: gl.tensor,
    num_columns: gl.tensor,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> None:
    """Load the blocks of this program's tiles, each into the next stage as soon as that is empty."""
    ROWS: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    HALF_N: gl.constexpr = weight.block_shape[0]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the stages are empty at first: a wait for the phase before the first one returns at once
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(index, tiles_m, tiles_n, GROUP_M)
        token = tile_m * (ROWS * 2)
        gate = tile_n * HALF_N
        for block in range(num_blocks):
            feature = block * BLOCK_K
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(arrived, (ROWS + HALF_N) * 2 * BLOCK_K * 2)  # bytes, those out of bounds included
            tma.async_copy_global_to_shared(weight, [gate, feature], arrived, halves.index(2 * stage))
            tma.async_copy_global_to_shared(x, [token, feature], arrived, tokens.index(2 * stage))
            tma.async_copy_global_to_shared(x, [token + ROWS, feature], arrived, tokens.index(2 * stage + 1))
            tma.async_copy_global_to_shared(weight, [num_columns + gate, feature], arrived, halves.index(2 * stage + 1))
            stage, phase = _advance(stage, phase, STAGES)


@_jit
def _consume(
    tokens: gl.shared_memory_descriptor,
    rows: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    empty: gl.shared_memory_descriptor,
    staging: gl.shared_memory_descriptor,
    out: tma.tensor_descriptor,
    tiles_m: gl.tensor,
    tiles_n: gl.tensor,
    num_blocks: gl.tensor,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
) -> None:
    """Multiply, gate and store one half of the tokens of this program's tiles."""
    ROWS: gl.constexpr = tokens.shape[1]
    BLOCK_N: gl.constexpr = rows.shape[1]
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    HALF_TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 16])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if CONSUMER == 1:
        # Behind the first consumer from the start, so that they do not reach their epilogues together. They drift apart
        # by themselves, too: without this it is no slower where many tiles follow each other.
        mbarrier.wait(full.index(STAGES - 1), 0, pred=num_blocks >= STAGES)
    acc = gl.zeros((ROWS, BLOCK_N), dtype=gl.float32, layout=TILE)
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(index, tiles_m, tiles_n, GROUP_M)
        # The first block overwrites what the tile before left in the accumulator.
        mbarrier.wait(full.index(stage), phase)
        acc = warpgroup_mma(
            tokens.index(2 * stage + CONSUMER), rows.index(stage).permute((1, 0)), acc, use_acc=False, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=(acc,))
        before = stage
        stage, phase = _advance(stage, phase, STAGES)
        for _ in range(1, num_blocks):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                tokens.index(2 * stage + CONSUMER), rows.index(stage).permute((1, 0)), acc, is_async=True
            )
            # All but this product have ended, so nothing reads the stage before any more.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = _advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        gate, up = _halves(acc, HALF_TILE)
        gated = (_silu(gate, out.dtype) * up).to(out.dtype)
        place = staging.index(CONSUMER)
        tma.store_wait(0)  # until the tile before has been read from there
        place.store(gated)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [(tile_m * 2 + CONSUMER) * ROWS, tile_n * (BLOCK_N // 2)], place)
    tma.store_wait(0)


@_jit
def _tile_of(index: gl.tensor, tiles_m: gl.tensor, tiles_n: gl.tensor, GROUP_M: gl.constexpr) -> gl.tuple:
    """Tiles that run at once form a block of GROUP_M tiles of tokens."""
    in_group = GROUP_M * tiles_n
    group = index // in_group
    first = group * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    within = index - group * in_group
    tile_n = within // height
    return first + within - tile_n * height, tile_n


@_jit
def _advance(stage: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> gl.tuple:
    """The next stage, and the phase of its barriers to wait for, which changes with each round."""
    following = stage + 1
    wrapped = (following == STAGES).to(gl.int32)
    return following - wrapped * STAGES, phase ^ wrapped


@_jit
def _halves(tile: gl.tensor, LAYOUT: gl.constexpr) -> gl.tuple:
    """[tokens, 2 * columns] to gate and up, [tokens, columns] each. No data moves: both lie in the same thread."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    gate, up = gl.split(gl.permute(gl.reshape(tile, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return gl.convert_layout(gate, LAYOUT, assert_trivial=True), gl.convert_layout(up, LAYOUT, assert_trivial=True)


@_jit
def _silu(x: gl.tensor, DTYPE: gl.constexpr) -> gl.tensor:
    """x times its sigmoid, for a result that is rounded to DTYPE.

    For bfloat16 by the hardware's tanh, (1 + tanh(x / 2)) / 2: one instruction in place of an exponential and a
    division, 304 µs against 326 for 16,384 tokens. Its relative error is at most 2⁻¹¹, the sigmoid's absolute error
    2.4e-4, an eighth of what bfloat16 rounds off a sigmoid near 1. Where the gate is far below 0 the sigmoid is itself
    that small, and its relative error is larger than the rounding's; these outputs weigh little: over normal gates the
    error adds at most 0.03 % to the norm of the output, rounding 0.17 %. float16 rounds off 0.02 %, and gets the exact
    one.

    Source: PTX ISA, `tanh.approx`.
    """
    if DTYPE.is_bf16():
        half = 0.5 * x
        tanh = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1
        )
        return half * tanh + half
    return x / (1.0 + gl.exp(-x))
