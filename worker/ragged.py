"""A batch on the device: sequences one after the other, without padding between them.

Sequences are put in order of length when a batch is loaded, so that those of equal length lie side by side. Attention
over them is then one batched call on views of each such group: no padding, no mask, no copy (measured on a CPU against
a loop over sequences, where a call's own cost is most of the cost of a short text). Models see this order only;
`restore` puts rows back into the batch's order. Rejected: order of arrival with a mask, which computes the square of
the longest sequence for each.

Everything that a batch claims is checked here, once; below nothing is checked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.protocol import cu_seqlens

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.protocol import Batch


class BadBatch(ValueError):
    """A batch asks for what this model does not have; the text says what."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may ask of a model."""

    vocab_size: int
    max_tokens: int  # of one sequence, special tokens included
    dimensions: int


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """`num_sequences` sequences of `length` tokens each, side by side from token `start` on."""

    start: int
    num_sequences: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.num_sequences * self.length


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All tensors are int32 on one device; sequences are in order of length, shortest first."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens] 0 … length - 1 within each sequence
    cu_seqlens: torch.Tensor  # [sequences + 1] sequence i is tokens cu_seqlens[i] … cu_seqlens[i + 1] - 1
    dimensions: torch.Tensor  # [sequences] columns that count
    normalize: torch.Tensor  # [sequences] 0 or 1
    restore: torch.Tensor  # [sequences] row i of the batch's own order is row restore[i] here
    groups: tuple[LengthGroup, ...]  # on the host: all sequences, by length
    max_seqlen: int

    @property
    def num_sequences(self) -> int:
        return self.restore.shape[0]

    @classmethod
    def load(cls, batch: Batch, limits: Limits, device: torch.device) -> RaggedBatch:
        """Check a batch and put it on the device.

        Raises:
            BadBatch: a token id, a length, a number of dimensions or a flag is outside the model's limits.
        """
        _check(batch, limits)
        order = np.argsort(batch.lengths, kind="stable").astype(np.int32)
        lengths = batch.lengths[order]
        starts = cu_seqlens(lengths)
        positions = np.arange(len(batch.token_ids), dtype=np.int32) - np.repeat(starts[:-1], lengths)
        sources = np.repeat(cu_seqlens(batch.lengths)[:-1][order], lengths) + positions
        restore = np.empty_like(order)
        restore[order] = np.arange(len(order), dtype=np.int32)
        tensors = _to_device(
            [
                batch.token_ids[sources],
                positions,
                starts,
                batch.dimensions[order],
                batch.normalize[order].astype(np.int32),
                restore,
            ],
            device,
        )
        token_ids, device_positions, offsets, dimensions, normalize, device_restore = tensors
        return cls(
            token_ids=token_ids,
            positions=device_positions,
            cu_seqlens=offsets,
            dimensions=dimensions,
            normalize=normalize,
            restore=device_restore,
            groups=_groups(lengths, starts),
            max_seqlen=int(lengths[-1]),
        )


def _check(batch: Batch, limits: Limits) -> None:
    # That lengths are positive and add up, and that no token id is negative, the message itself has made sure of.
    if (largest := int(batch.token_ids.max())) >= limits.vocab_size:
        raise BadBatch(f"token id {largest}, but the model has {limits.vocab_size} tokens")
    if (longest := int(batch.lengths.max())) > limits.max_tokens:
        raise BadBatch(f"a sequence of {longest} tokens, but the model takes {limits.max_tokens}")
    fewest, most = int(batch.dimensions.min()), int(batch.dimensions.max())
    if fewest < 1 or most > limits.dimensions:
        raise BadBatch(f"{fewest} to {most} dimensions, but the model has 1 to {limits.dimensions}")
    if int(batch.normalize.max()) > 1:
        raise BadBatch("a normalize flag is neither 0 nor 1")


def _groups(lengths: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]) -> tuple[LengthGroup, ...]:
    """The runs of equal length of a sorted list."""
    firsts = np.flatnonzero(np.diff(lengths, prepend=0))
    counts = np.diff(firsts, append=len(lengths))
    return tuple(
        LengthGroup(start, count, length)
        for start, count, length in zip(starts[firsts].tolist(), counts.tolist(), lengths[firsts].tolist(), strict=True)
    )


def _to_device(arrays: list[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Views of one int32 buffer, so that a device gets everything in one copy."""
    buffer = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return list(torch.split(buffer, [len(array) for array in arrays]))
