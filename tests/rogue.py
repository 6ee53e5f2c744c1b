"""What a peer with a bug sends: messages that were changed on the way, and headers that are all cost.

The source of everything is a `random.Random`: the same seed, the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import msgpack

from common.wire.codec import MAX_FRAMES, MAX_HEADER_BYTES, Message, encode

_NUM_KINDS = 18
_MOST_FRAMES = 20
_ELEMENTS = (12_000, 65_000)  # in each of a bomb's lists: as many as are allowed, and as many as there is room for


def mutated(rng: random.Random, messages: Sequence[Message]) -> list[bytes]:
    """One of `messages`, its frames changed one to four times: 0 to 20 of them, rarely a message any more."""
    frames = [bytearray(frame) for frame in encode(rng.choice(messages))]
    for _ in range(rng.randint(1, 4)):
        if frames:
            rng.choice(_CHANGES)(rng, frames)
    return [bytes(frame) for frame in frames[:_MOST_FRAMES]]


def _flip_bit(rng: random.Random, frames: list[bytearray]) -> None:
    if frame := rng.choice(frames):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)


def _cut_frame(rng: random.Random, frames: list[bytearray]) -> None:
    frame = rng.choice(frames)
    del frame[rng.randint(0, len(frame)) :]


def _extend_frame(rng: random.Random, frames: list[bytearray]) -> None:
    rng.choice(frames).extend(rng.randbytes(rng.randint(1, 9)))


def _drop_frame(rng: random.Random, frames: list[bytearray]) -> None:
    frames.pop(rng.randrange(len(frames)))


def _repeat_frame(rng: random.Random, frames: list[bytearray]) -> None:
    frames.extend([bytearray(rng.choice(frames))] * rng.choice((1, 1, 2, MAX_FRAMES, _MOST_FRAMES)))


def _swap_frames(rng: random.Random, frames: list[bytearray]) -> None:
    frames.insert(rng.randint(0, len(frames) - 1), frames.pop(rng.randrange(len(frames))))


def _change_kind(rng: random.Random, frames: list[bytearray]) -> None:
    header = frames[0]
    place = {0xDC: 3, 0xDD: 5}.get(header[0], 1) if header else 1
    if place < len(header):
        header[place] = rng.randint(0, _NUM_KINDS + 1)


def _change_field(rng: random.Random, frames: list[bytearray]) -> None:
    """Another type or an extreme value in a field of a header that can still be read."""
    try:
        header = msgpack.unpackb(frames[0])
    except Exception:  # noqa: BLE001  # changed before
        return
    if isinstance(header, list) and header:
        header[rng.randrange(len(header))] = rng.choice(_VALUES)
        frames[0] = bytearray(msgpack.packb(header))


_VALUES = (None, True, -1, 0, 2**31, 2**63 - 1, 2**64 - 1, 1.5, float("nan"), "", "x" * 20_000, b"x", [], [[2**40]], {})
_CHANGES = (
    _flip_bit,
    _flip_bit,
    _cut_frame,
    _extend_frame,
    _drop_frame,
    _repeat_frame,
    _swap_frames,
    _change_kind,
    _change_field,
    _change_field,
)


def bombs() -> dict[str, bytes]:
    """Headers of 64 KiB at the most that hold as much as they can of one thing."""
    units = {
        "lists": b"\x90",
        "maps": b"\x80",
        "lists of a list": b"\x91\x90",
        "lists of lists": b"\x9f" + b"\x90" * 15,
        "maps of a list": b"\x81\xa0\x90",
        "lists 500 deep": b"\x91" * 500 + b"\x90",
        "small integers": b"\xe5",
        "integers": b"\xcd\xff\xff",
        "floats": b"\xca\x00\x00\x00\x01",
        "texts": b"\xa2ab",
        "texts that are not UTF-8": b"\xa2\xff\xff",
        "bytes": b"\xc4\x00",
        "extensions": b"\xd4\x05\x00",
        "empty extensions": b"\xc7\x00\x05",
        "times": b"\xd6\xff\x00\x00\x00\x01",
    }
    found = {f"{name}, {most} each": _lists_of(unit, most) for (name, unit), most in product(units.items(), _ELEMENTS)}
    found |= {
        "a list that never ends": b"\x91" * MAX_HEADER_BYTES,
        "a map that never ends": b"\x81\xa0" * (MAX_HEADER_BYTES // 2),
        "a list of four billion": b"\xdd\xff\xff\xff\xff" + b"\x90" * 1000,
        "a map of four billion": b"\xdf\xff\xff\xff\xff" + b"\xa0\x90" * 1000,
        "a text of four billion": b"\x91\xdb\xff\xff\xff\xff" + b"x" * 1000,
        "one text": b"\x91\xdb\x00\x00\xff\xf0" + b"x" * 0xFFF0,
    }
    return found


def _lists_of(unit: bytes, most: int) -> bytes:
    """A list of lists, each of so many of this at the most, until 64 KiB are full."""
    lists: list[bytes] = []
    left = MAX_HEADER_BYTES - 5
    while (count := min(most, (left - 5) // len(unit))) > 0:
        lists.append(b"\xdd" + count.to_bytes(4, "big") + unit * count)
        left -= len(lists[-1])
    return b"\xdd" + len(lists).to_bytes(4, "big") + b"".join(lists)
