"""Short messages of one kind that travel as one: Requests and Replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from common.lanes import LANES
from common.wire.messages import (
    MAX_INT32,
    NO_NUMBERS,
    NO_SPANS,
    NO_TIMES,
    ByteMatrix,
    Int32Vector,
    Int64Matrix,
    Reply,
    Request,
    check_tokens,
)
from common.wire.rows import ENCODINGS

# The most requests in one message. A scheduler takes about 10 µs for each, and looks at nothing else meanwhile.
MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Requests:
    """Short requests that one gateway sends at one moment: as single messages they would cost more than their content.

    Each is admitted, answered, failed and cancelled as if it were alone. All are of one model, without tokens of type
    1, spans and traces. Most requests are like that; any other travels alone.
    """

    fingerprint: str
    # [requests, 9] the fields of each request: request_id, deadline_ns, index of its lane in LANES, tenant, opens,
    # dimensions, normalize, number of its encoding, number of its sequences.
    asked: Int64Matrix
    token_ids: Int32Vector  # [tokens], all sequences of all requests one after the other
    lengths: Int32Vector  # [sequences]

    def __post_init__(self) -> None:
        check_tokens(self.lengths, self.token_ids)
        if self.asked.shape[1] != 9 or not 1 <= len(self.asked) <= MAX_REQUESTS:
            raise ValueError(f"needs nine numbers of each of 1 to {MAX_REQUESTS} requests")
        # Python's minimum and maximum, since numpy's take longer for so few numbers.
        rows = self.asked.tolist()
        _, _, lanes, _, opens, dimensions, normalize, encodings, num_sequences = zip(*rows, strict=True)
        if min(map(min, rows)) < 0:
            raise ValueError("a number of a request is negative")
        if max(lanes) >= len(LANES) or max(encodings) >= len(ENCODINGS):
            raise ValueError("a lane or an encoding that there is not")
        if max(opens) > 1 or max(normalize) > 1:
            raise ValueError("needs 0 or 1 where a request says yes or no")
        if max(dimensions) > MAX_INT32:
            raise ValueError("more dimensions than a Batch can say")
        if min(num_sequences) < 1 or sum(num_sequences) != len(self.lengths):
            raise ValueError("needs a sequence in each request, and a request for each sequence")

    @staticmethod
    def may_hold(request: Request) -> bool:
        """Whether a request can travel together with others of its model."""
        return not (len(request.type_starts) or len(request.span_counts) or len(request.times_ns))

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Requests:
        """Put requests together: at most MAX_REQUESTS of one model, each as `may_hold` allows."""
        assert all(map(cls.may_hold, requests)), "a request whose spans, types or times would be lost"
        assert len({request.fingerprint for request in requests}) == 1, "requests of several models"
        asked = [
            (
                request.request_id,
                request.deadline_ns,
                LANES.index(request.lane),
                request.tenant,
                request.opens,
                request.dimensions,
                request.normalize,
                ENCODINGS[request.encoding],
                len(request.lengths),
            )
            for request in requests
        ]
        return cls(
            requests[0].fingerprint,
            np.array(asked, dtype=np.int64),
            np.concatenate([request.token_ids for request in requests]),
            np.concatenate([request.lengths for request in requests]),
        )

    def each(self) -> Iterator[Request]:
        """The requests as they were, in order. Their arrays are views."""
        encodings = list(ENCODINGS)
        token_offsets = list(accumulate(self.lengths.tolist(), initial=0))
        first = 0
        for (
            request_id,
            deadline_ns,
            lane,
            tenant,
            opens,
            dimensions,
            normalize,
            encoding,
            num_sequences,
        ) in self.asked.tolist():
            last = first + num_sequences
            yield _CheckedRequest(
                request_id,
                self.fingerprint,
                deadline_ns,
                LANES[lane],
                tenant,
                opens == 1,
                dimensions,
                normalize == 1,
                encodings[encoding],
                self.token_ids[token_offsets[first] : token_offsets[last]],
                self.lengths[first:last],
                NO_NUMBERS,  # passed, since a default takes a call
                NO_NUMBERS,
                NO_SPANS,
                NO_TIMES,
            )
            first = last


@dataclass(frozen=True, slots=True)
class _CheckedRequest(Request):
    """A request from a Requests, which was checked as a whole. To check each again would take longer than the rest."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Replies:
    """The rows of several requests of one gateway from one batch, one row for each request."""

    step_us: int
    answers: Int64Matrix  # [requests, 3]: request_id, first_row and queue_us of each, as in a Reply
    rows: ByteMatrix  # [requests, row bytes]

    def __post_init__(self) -> None:
        if self.answers.shape != (len(self.rows), 3) or int(self.answers.min(initial=0)) < 0:
            raise ValueError("needs three non-negative numbers for each of its rows")

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> Replies:
        """Put replies together: of one batch, with one row each."""
        answers = [(reply.request_id, reply.first_row, reply.queue_us) for reply in replies]
        rows = np.concatenate([reply.rows for reply in replies])
        return cls(replies[0].step_us, np.array(answers, dtype=np.int64), rows)

    def each(self) -> Iterator[Reply]:
        """The replies as they were."""
        for index, (request_id, first_row, queue_us) in enumerate(self.answers.tolist()):
            yield Reply(request_id, first_row, queue_us, self.step_us, self.rows[index : index + 1])
