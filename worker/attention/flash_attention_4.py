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
import warnings
from typing import TYPE_CHECKING

import torch

from worker.attention import Attention, AttentionUnavailable

if TYPE_CHECKING:
    from worker.batch.ragged import Mask, RaggedBatch

MAX_ROWS = 256  # of cu_seqlens: more take another compilation

REQUIREMENT = "flash-attn-4==4.0.0b36"


class FlashAttention4(Attention):
    def __init__(self) -> None:
        """Raises AttentionUnavailable: the package does not load. It takes ten seconds to import."""
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
            raise AttentionUnavailable(f"the package does not load, install {REQUIREMENT}: {error}") from error

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        assert mask.is_plain
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._forward(
            query,
            key,
            value,
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=batch.cu_seqlens,
            causal=mask.causal,
            out=output,
        )
        return output
