"""The inputs of which workers died, so that none costs more than three workers, however often it is sent.

An input that was running, alone by then, when a third worker died is in quarantine (`batching.py` has the steps that
lead there). For an hour it is refused without running, and so are its copies that wait; then it gets another chance,
since drivers and models are mended. An input of which fewer workers have died is a suspect for ten minutes, or until it
was answered. It goes on at the step that it had reached, whichever client sends it. Otherwise a client that gives up
before a worker has restarted, and tries again, would find it innocent each time.

The store keeps a keyed hash of what the device sees of a sequence: the model, the token ids and where the tokens of
type 1 begin. The spans that are pooled and the format of the rows are not in it: each way to ask for the same text
would otherwise cost three workers. The key is secret, so no client can make a harmless input that is taken for a deadly
one, and the store says nothing of the texts. Pure: time is an argument.

The store dies with the scheduler. Rejected: a copy in the gateways, which needs a message kind, a second place that has
to forget, and hashing in each of them. A scheduler's death is rare, an input that kills is rarer, and both together
cost what the input cost the first time.

An empty store is not asked, and it is empty but for a while after a death. Otherwise the length of each sequence is
looked up first (50 ns). A sequence is hashed only if an input of this length is remembered: 2 µs of the 42 that the
scheduler has for one (2026-11-30, 2-core VM).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby

from scheduler.batching import MAX_LOSSES, Part

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Input:
    num_tokens: int
    losses: int  # of workers that ran it
    expires_ns: int


@dataclass(slots=True)
class _Store:
    """Inputs by digest, the oldest first. When the store is full, the oldest is dropped."""

    max_inputs: int
    max_age_ns: int
    lengths: Counter[int]  # of all inputs of all stores, in tokens
    inputs: dict[bytes, _Input] = field(default_factory=dict)

    def add(self, digest: bytes, num_tokens: int, losses: int, now_ns: int) -> None:
        self.remove(digest)
        if len(self.inputs) >= self.max_inputs:
            self.remove(next(iter(self.inputs)))
        self.inputs[digest] = _Input(num_tokens, losses, now_ns + self.max_age_ns)
        self.lengths[num_tokens] += 1

    def remove(self, digest: bytes) -> None:
        known = self.inputs.pop(digest, None)
        if known is not None:
            self.lengths[known.num_tokens] -= 1
            if not self.lengths[known.num_tokens]:
                del self.lengths[known.num_tokens]

    def expire(self, now_ns: int) -> None:
        while self.inputs and next(iter(self.inputs.values())).expires_ns <= now_ns:
            self.remove(next(iter(self.inputs)))


class Quarantine:
    def __init__(self, key: bytes) -> None:
        """`key`: of at most 64 bytes, secret, another one at every start."""
        self._key = key
        self._lengths: Counter[int] = Counter()
        # Three workers die before an input is in quarantine, which takes seconds: 1,000 inputs are most of an hour of
        # nothing but deaths. Suspects are all sequences that ran when a worker died.
        self._deadly = _Store(1000, 3_600_000_000_000, self._lengths)
        self._suspects = _Store(4096, 600_000_000_000, self._lengths)

    def __len__(self) -> int:
        return len(self._deadly.inputs) + len(self._suspects.inputs)

    def blame(self, part: Part, now_ns: int) -> None:
        """A worker has died while it ran these sequences, for which `part.losses` counts already."""
        for sequence in range(part.start, part.stop):
            digest = self._digest(part, sequence)
            num_tokens = part.pending.offsets[sequence + 1] - part.pending.offsets[sequence]
            if part.losses >= MAX_LOSSES:
                self._suspects.remove(digest)
                self._deadly.add(digest, num_tokens, part.losses, now_ns)
            elif digest not in self._deadly.inputs:
                known = self._suspects.inputs.get(digest)
                losses = part.losses if known is None else max(part.losses, known.losses)
                self._suspects.add(digest, num_tokens, losses, now_ns)

    def acquit(self, part: Part) -> None:
        """These sequences have run, and no worker died."""
        for sequence in range(part.start, part.stop):
            self._suspects.remove(self._digest(part, sequence))

    def split_by_suspicion(self, part: Part, now_ns: int) -> list[Part]:
        """A part as one part for each run of sequences of which as many workers have died."""
        self._deadly.expire(now_ns)
        self._suspects.expire(now_ns)
        known = dict(self._known(part))
        if not known:
            return [part]
        parts = []
        for losses, run in groupby(range(part.start, part.stop), lambda index: max(part.losses, known.get(index, 0))):
            sequences = list(run)
            parts.append(replace(part, start=sequences[0], stop=sequences[-1] + 1, losses=losses))
        return parts

    def _known(self, part: Part) -> Iterator[tuple[int, int]]:
        """The sequences of a part that are remembered, each with how many workers have died of it."""
        offsets = part.pending.offsets
        for sequence in range(part.start, part.stop):
            if offsets[sequence + 1] - offsets[sequence] in self._lengths:
                digest = self._digest(part, sequence)
                known = self._deadly.inputs.get(digest) or self._suspects.inputs.get(digest)
                if known is not None:
                    yield sequence, known.losses

    def _digest(self, part: Part, sequence: int) -> bytes:
        request, offsets = part.pending.request, part.pending.offsets
        start, stop = offsets[sequence], offsets[sequence + 1]
        type_start = int(request.type_starts[sequence]) if len(request.type_starts) else stop - start
        state = blake2b(request.token_ids[start:stop].tobytes(), digest_size=_DIGEST_BYTES, key=self._key)
        state.update(b"%d %s" % (type_start, request.fingerprint.encode()))
        return state.digest()
