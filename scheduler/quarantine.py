"""Which inputs workers died of, so that they are not run again. Pure: time is an argument.

An input that was running, alone by then, when a third worker died is given up (`batching.py`). Sent again it would cost
three more, each some seconds of a worker's time, for everybody: so it is remembered for an hour and refused unrun.
After that it gets another chance, since drivers and models are mended.

What is remembered is a keyed hash of what the device sees of a sequence: the model, the token ids and where the tokens
of type 1 begin. Which spans of it are pooled, and how its rows are written, is not in it: whoever asks for the same
text in another way would otherwise pay three workers for each way. The key is one that nobody outside knows, so that
nobody can make a harmless input that is taken for a deadly one, and what is kept says nothing of what was sent.

It dies with the scheduler. Handed to the gateways it would outlive that, for a message kind, a second place that has to
forget, and hashing in each of them; but a scheduler's death is rare, an input that kills is rarer, and both together
cost what the input cost the first time. Its refusals are as cheap as any other that the scheduler makes.

Of an empty store nothing is asked. Else the length of each sequence is looked up first (50 ns), and only where an input
of this very length is remembered is the sequence hashed: 2 µs of the 42 that the scheduler has for one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

from scheduler.batching import Part

# An input costs three workers before it is remembered, which takes seconds: a thousand of them is most of an hour of
# nothing but deaths. The oldest makes room.
_MAX_INPUTS = 1000
_MAX_AGE_NS = 3_600_000_000_000

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Remembered:
    num_tokens: int
    expires_ns: int


class Quarantine:
    def __init__(self, key: bytes) -> None:
        """`key`: of at most 64 bytes, secret, another one at every start."""
        self._key = key
        self._inputs: dict[bytes, _Remembered] = {}  # by digest, the oldest first
        self._lengths: Counter[int] = Counter()  # of the inputs, in tokens

    def __len__(self) -> int:
        return len(self._inputs)

    def add(self, part: Part, now_ns: int) -> None:
        """Remember a single sequence."""
        assert part.num_sequences == 1, "only what ran alone is known to be at fault"
        digest = self._digest(part, part.start)
        self._forget(digest)
        if len(self._inputs) >= _MAX_INPUTS:
            self._forget(next(iter(self._inputs)))
        self._inputs[digest] = _Remembered(part.num_tokens, now_ns + _MAX_AGE_NS)
        self._lengths[part.num_tokens] += 1

    def find(self, part: Part, now_ns: int) -> int | None:
        """The first sequence of these that is remembered, counted within its request; None where none is."""
        while self._inputs and next(iter(self._inputs.values())).expires_ns <= now_ns:
            self._forget(next(iter(self._inputs)))
        offsets = part.pending.offsets
        for sequence in range(part.start, part.stop) if self._inputs else ():
            is_as_long = offsets[sequence + 1] - offsets[sequence] in self._lengths
            if is_as_long and self._digest(part, sequence) in self._inputs:
                return sequence
        return None

    def _forget(self, digest: bytes) -> None:
        known = self._inputs.pop(digest, None)
        if known is not None:
            self._lengths[known.num_tokens] -= 1
            self._lengths += Counter()  # drops what is at 0

    def _digest(self, part: Part, sequence: int) -> bytes:
        request, offsets = part.pending.request, part.pending.offsets
        start, stop = offsets[sequence], offsets[sequence + 1]
        type_start = int(request.type_starts[sequence]) if len(request.type_starts) else stop - start
        state = blake2b(request.token_ids[start:stop].tobytes(), digest_size=_DIGEST_BYTES, key=self._key)
        state.update(b"%d %s" % (type_start, request.fingerprint.encode()))
        return state.digest()
