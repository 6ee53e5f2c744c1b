"""FlashAttention-4's kernels (CuTe DSL), compiled at first use: usually the fastest for middle lengths.

What to know of it (GPU measurements: benchmarks/attention.py):
- The grid depends on the numbers of tokens and of rows in cu_seqlens alone, never on lengths. The host plans nothing.
- A row costs tiles even if it is empty, so many empty rows are ruinous (144 µs a layer instead of 6 at 512 rows). So
  the choice of a backend has to depend on the capacity of the sequence axis.
- `max_seqlen_q` is never given. The sm_90 kernel ignores it, but a small value selects another compilation, and those
  two seconds would delay the first batch of short texts. More than 256 rows select another one too. `select` avoids
  it: so many rows are slow anyway.
- An eager call costs the host about 100 µs, several times a small kernel: it is meant to be replayed.

The function that takes the output's buffer is private to the package, and another version may lack it. So `table`
checks the output before it trusts any version.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

import torch

from worker.attention import Attention, AttentionUnavailable

if TYPE_CHECKING:
    from worker.batch.ragged import Mask, RaggedBatch

MAX_ROWS = 256  # of cu_seqlens: more need another compilation

REQUIREMENT = "flash-attn-4==4.0.0b36"


class FlashAttention4(Attention):
    def __init__(self) -> None:
        """Raises AttentionUnavailable: the package does not load. It takes ten seconds to import."""
        # Each compilation warns of an argument that is None here. A filter around the call would not be thread-safe.
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
