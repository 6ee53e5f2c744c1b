"""FlashAttention-4's kernels (CuTe DSL), compiled at first use: the fastest here for most middle lengths.

What to know of it (GPU measurements: benchmarks/attention.py):
- The grid depends on the numbers of tokens and of rows in cu_seqlens alone, never on lengths; nothing is planned on
  the host. But a row costs tiles whether it is empty or not, so many empty rows are ruinous (144 µs a layer instead
  of 6 at 512 rows): who chooses must know the capacity of the sequence axis.
- `max_seqlen_q` is ignored by the sm_90 kernel but selects another compilation where it is small, so it is never given:
  a second compilation of two seconds would land on the first batch of short texts. More than 256 rows are one more,
  which `select` avoids: they are too many anyway.
- An eager call costs the host about 100 µs, several times a small kernel: it is meant to be replayed.

The function that takes the output's buffer is private to the package, so another version may lack it: `select` checks
what comes out before it trusts any.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING

import torch

from worker.attention import AttentionUnavailable, HeadShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from worker.batch.ragged import RaggedBatch

MAX_ROWS = 256  # of cu_seqlens: more take another compilation

_REQUIREMENT = "flash-attn-4==4.0.0b36"


class FlashAttention4:
    name = "flash_attention_4"
    needs_max_seqlen = False
    prepares = False

    def __init__(self, shape: HeadShape) -> None:
        """Raises AttentionUnavailable: the package is missing or broken, or its kernels do not have this head shape."""
        if reason := unavailable(shape):
            raise AttentionUnavailable(f"attention flash_attention_4: {reason}")
        # Said at each compilation, about an argument that is None here. Not around the call: that is not thread-safe.
        warnings.filterwarnings(
            "ignore",
            r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument",
            UserWarning,
            module=r".*\.base_dsl\.dsl",
        )
        try:
            self._forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
        except (ImportError, AttributeError) as error:
            raise AttentionUnavailable(
                f"attention flash_attention_4: the package does not load, install {_REQUIREMENT}: {error}"
            ) from error

    def at(self, tokens: int, sequences: int) -> FlashAttention4:
        return self

    def prepare(self, cu_seqlens: npt.NDArray[np.int32]) -> None:
        pass

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        *,
        causal: bool,
        window: int | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert window is None
        assert bias is None
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._forward(
            query,
            key,
            value,
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=batch.cu_seqlens,
            causal=causal,
            out=output,
        )
        return output


def unavailable(shape: HeadShape) -> str | None:
    """Why these kernels cannot serve a head shape here, without the ten seconds of importing them; None if they can."""
    try:
        found = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    except ImportError as error:  # another flash_attn is installed, and does not load
        return f"not installed: {_REQUIREMENT} ({error})"
    if found is None:
        return f"not installed: {_REQUIREMENT}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {shape.dtype}"
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"head_dim {shape.head_dim} is not a multiple of 8 up to 256"
    return None
