"""FlashInfer's ragged prefill kernels, planned on the host for each batch.

There are two sets of kernels. `fa3` is for Hopper: a persistent grid reads a list of work, so neither lengths nor the
capacity of the sequence axis cost anything. `fa2` is for any GPU since Ampere. The host makes the list in 0.1 to 1 ms a
batch, once for all layers (`prepare`).

A graph is captured with one plan and replayed with others. These rules hold between them (read in
flashinfer/prefill.py and include/flashinfer/attention/scheduler.cuh, version 0.6.13):
- The number of rows of cu_seqlens is fixed, and no plan may have more tokens than the first. So `at` plans a full
  capacity first. Every later plan then has the same offsets and grid, whatever the lengths; this is compared.
- Work lists and offsets are read at fixed addresses. Every instance reads the same device workspace. A plan's copy and
  the kernels that read it are on one stream, so the next plan cannot overtake them.
- The copy is from pinned memory, which the next plan would overwrite although the copy may not have run. So each plan
  takes the next buffer of a pinned ring, and waits if that buffer's copy is still to come.

In graphs `fa2` always splits keys, into a float32 workspace that grows with the capacity up to gigabytes. A capacity
whose workspace would exceed a limit stays eager: `at` returns the eager instance, which refuses to be captured.

Its modules are compiled at first use, with nvcc for minutes, unless they were built ahead of time or by an earlier
start (`is_built`).
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from worker.attention import Attention, AttentionUnavailable, HeadShape

if TYPE_CHECKING:
    from types import ModuleType

    import numpy.typing as npt
    from flashinfer.jit import JitSpec

    from worker.batch.ragged import Mask, RaggedBatch

logger = logging.getLogger(__name__)

Kernels = Literal["fa2", "fa3"]

REQUIREMENTS = "flashinfer-python==0.6.13 and apache-tvm-ffi"

_INTEGER_WORKSPACE_BYTES = 8 * 1024**2  # what FlashInfer takes; 32,768 tokens in 1,024 sequences need 0.7 MB
_FLOAT_WORKSPACE_BYTES = {"fa2": 128 * 1024**2, "fa3": 1024}  # at first; fa3 does not use it
_MAX_FLOAT_WORKSPACE_BYTES = 1024**3
_RING_SIZE = 4  # plans whose copies may be under way; more than the steps that may be


class FlashInferAttention(Attention):
    prepares = True

    def __init__(self, shape: HeadShape, device: torch.device, kernels: Kernels) -> None:
        """Load the kernels; compile them first, for one or two minutes, if they are not built.

        Raises:
            AttentionUnavailable: the package does not load, or the kernels do not compile.
        """
        prefill = _prefill()
        if not is_built(shape, kernels):
            logger.info(
                "compiling FlashInfer's %s kernels for head_dim %d: one to two minutes", kernels, shape.head_dim
            )
            try:
                _module_spec(prefill, shape, kernels).build(verbose=False)
            except (OSError, RuntimeError) as error:
                raise AttentionUnavailable(
                    f"its kernels do not compile, which takes ninja and CUDA's nvcc: {error}"
                ) from error
        self._shape = shape
        self._workspace = _Workspace(prefill, device, kernels)
        self._planned = _Planned(self._workspace, shape, None)

    def at(self, tokens: int, sequences: int) -> Attention:
        num_bytes = self._workspace.float_bytes(self._shape, tokens, sequences)
        if num_bytes > _MAX_FLOAT_WORKSPACE_BYTES:
            return self
        self._workspace.reserve(num_bytes)
        return _CapturedFlashInfer(_Planned(self._workspace, self._shape, (tokens, sequences)))

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        self._planned.plan(cu_seqlens)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        assert mask.is_plain
        del batch  # `prepare` has read its offsets
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a graph of this capacity would take {self.name} too much memory")
        return self._planned.run(query, key, value, mask.causal)


class _CapturedFlashInfer(Attention):
    """The instance of one capacity: its plans keep the offsets and the grid that its graph was captured with."""

    prepares = True

    def __init__(self, planned: _Planned) -> None:
        self._planned = planned

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        self._planned.plan(cu_seqlens)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        assert mask.is_plain
        del batch
        return self._planned.run(query, key, value, mask.causal)


def is_built(shape: HeadShape, kernels: Kernels) -> bool:
    """Whether the kernels can be loaded without compiling them.

    Raises:
        AttentionUnavailable: the package does not load.
    """
    return bool(_module_spec(_prefill(), shape, kernels).is_compiled)


def _prefill() -> ModuleType:
    try:
        return importlib.import_module("flashinfer.prefill")
    except (ImportError, OSError, RuntimeError) as error:  # it looks for a compiler and writes a folder on import
        raise AttentionUnavailable(f"{REQUIREMENTS} do not load: {error}") from error


def _module_spec(prefill: ModuleType, shape: HeadShape, kernels: Kernels) -> JitSpec:
    """FlashInfer's description of the module that `plan` loads: no positions, no window, no cap on scores."""
    dtype, head_dim = shape.dtype, shape.head_dim
    return prefill.gen_batch_prefill_module(
        kernels, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
    )


# --- plans ---


@dataclass(slots=True)
class _Slot:
    """Pinned memory of one plan, free again after the event `copied`."""

    integers: torch.Tensor
    cu_seqlens: torch.Tensor
    copied: torch.cuda.Event


class _Workspace:
    """The buffers that the instances of one model share."""

    def __init__(self, prefill: ModuleType, device: torch.device, kernels: Kernels) -> None:
        self.prefill = prefill
        self.kernels = kernels
        self.integers = torch.zeros(_INTEGER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.floats = torch.empty(_FLOAT_WORKSPACE_BYTES[kernels], dtype=torch.uint8, device=device)
        # Zeros, since a plan copies its unused entries too.
        self._ring = [
            _Slot(
                torch.zeros(_INTEGER_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True),
                torch.empty(0, dtype=torch.int32, pin_memory=True),
                torch.cuda.Event(),
            )
            for _ in range(_RING_SIZE)
        ]
        self._next = 0

    def take(self, cu_seqlens: npt.NDArray[np.int32]) -> tuple[_Slot, torch.Tensor]:
        """The next slot, and the offsets in its memory."""
        slot = self._ring[self._next]
        self._next = (self._next + 1) % _RING_SIZE
        slot.copied.synchronize()
        if len(slot.cu_seqlens) < len(cu_seqlens):
            slot.cu_seqlens = torch.empty(2 * len(cu_seqlens), dtype=torch.int32, pin_memory=True)
        offsets = slot.cu_seqlens[: len(cu_seqlens)]
        offsets.numpy()[:] = cu_seqlens
        return slot, offsets

    def float_bytes(self, shape: HeadShape, tokens: int, sequences: int) -> int:
        """The bytes that scheduler.cuh's `PrefillPlan` takes in a graph: float32 partial results and their sums."""
        if self.kernels == "fa3":
            return 0
        group = shape.num_heads // shape.num_kv_heads
        # uint32 there: fewer tokens than sequences wrap around to a large number.
        longest_rows = ((tokens - sequences + 1) % 2**32) * group
        tile_rows = 128 if longest_rows > 64 and shape.head_dim < 256 else 64 if longest_rows > 16 else 16
        processors = torch.cuda.get_device_properties(self.floats.device).multi_processor_count
        num_tiles = max(2 * processors // shape.num_kv_heads, -(-tokens * group // tile_rows) + sequences - 1)
        return 4 * shape.num_heads * num_tiles * tile_rows * (shape.head_dim + 1) + 32

    def reserve(self, num_bytes: int) -> None:
        """Let later instances have `num_bytes`. Earlier ones keep the memory that their graphs know."""
        if num_bytes > len(self.floats):
            self.floats = torch.empty(num_bytes, dtype=torch.uint8, device=self.floats.device)


class _Planned:
    """A FlashInfer wrapper with its current plan: for one capacity, or for any batch if that is None."""

    def __init__(self, workspace: _Workspace, shape: HeadShape, capacity: tuple[int, int] | None) -> None:
        self._workspace = workspace
        self._shape = shape
        offsets = None
        if capacity is not None:
            # Queries and keys have the same offsets, so one buffer is both.
            offsets = torch.zeros(capacity[1] + 1, dtype=torch.int32, device=workspace.integers.device)
        self._wrapper = workspace.prefill.BatchPrefillWithRaggedKVCacheWrapper(
            workspace.floats,
            "NHD",
            use_cuda_graph=capacity is not None,
            qo_indptr_buf=offsets,
            kv_indptr_buf=offsets,
            backend=workspace.kernels,
        )
        self._wrapper._int_workspace_buffer = workspace.integers
        self._frozen: list[int] | None = None
        if capacity is not None:
            tokens, sequences = capacity
            full = np.full(sequences + 1, tokens, dtype=np.int32)
            full[0] = 0
            self.plan(full)
            self._frozen = list(self._wrapper._plan_info)

    @torch.inference_mode()  # buffers that were made in this mode are writable in it alone
    def plan(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        shape = self._shape
        slot, offsets = self._workspace.take(cu_seqlens)
        self._wrapper._pin_memory_int_workspace_buffer = slot.integers
        self._wrapper.plan(
            offsets,
            offsets,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            causal=shape.causal,
            q_data_type=shape.dtype,
        )
        slot.copied.record()
        if self._frozen is not None and list(self._wrapper._plan_info) != self._frozen:
            raise RuntimeError(f"a plan of FlashInfer's changed what graphs have frozen: {self._frozen}")

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        assert causal == self._shape.causal, "the plan is for the other mask"
        # Its kernels are not launched early: our own rely on every program having waited (kernels/launch.py).
        output: torch.Tensor = self._wrapper.run(query, key, value, enable_pdl=False)
        return output
