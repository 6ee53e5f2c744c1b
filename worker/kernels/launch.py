"""What every launch of a kernel shares: whether it may start before the kernel in front of it has ended.

A step of a small batch is a chain of some 250 short kernels, and the gap between two of them is as long as the kernels.
With programmatic dependent launch a kernel's programs are started while the one before still runs, and wait inside, at
`gdc_wait`, until that one has ended and all it wrote can be seen. Three rules make this safe:

1. Every program of every kernel calls `gdc_wait` once, before it reads or writes anything that another kernel writes.
   What a kernel waits for has itself waited, so the end of one kernel means the end of all before it.
2. Read before `gdc_wait` may be only what nothing in a step writes: weights, tables, and the batch's own integers.
3. The kernel that a step begins with (`embedding.py`) lets its successor start only after its own wait. So whatever
   wrote a step's inputs has ended before any later kernel of the step starts, which is what rule 2 relies on.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

# The first compute capability that has `griddepcontrol` (Hopper).
_FIRST_CAPABILITY = 9


def pdl_options(tensor: torch.Tensor) -> Mapping[str, bool]:
    """Keywords for a launch on the tensor's device: the kernel's constexpr `PDL`, and Triton's option where it is true.

    A kernel with `PDL` calls `tl.extra.cuda.gdc_wait` and `gdc_launch_dependents`; elsewhere, and in Triton's
    interpreter, which runs on CPU tensors and knows neither, it runs without.
    """
    if tensor.is_cuda and _has_pdl(tensor.get_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache  # a fact about the hardware; asking costs more than a launch
def _has_pdl(device_index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index)[0] >= _FIRST_CAPABILITY
