"""What the load generator makes of answers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections import Counter

import pytest

from benchmarks.load import Connection, Goal, Load, LoadError, Tally, Target, check_answer, percentile, summarize

QUERY = Load("query", 1, "query")
PAIR = Load("pair", 1, "document", texts_per_request=2, encoding="float")


def answer(*vectors: list[float], encoding: str = "float") -> bytes:
    def render(vector: list[float]) -> object:
        packed = struct.pack(f"<{len(vector)}f", *vector)
        return vector if encoding == "float" else base64.b64encode(packed).decode()

    data = [{"index": index, "embedding": render(vector)} for index, vector in enumerate(vectors)]
    return json.dumps({"data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}}).encode()


def test_percentile_is_the_nearest_rank() -> None:
    ordered = [1.0, 2.0, 3.0, 4.0]

    assert percentile(ordered, 50) == 2.0
    assert percentile(ordered, 99) == 4.0
    assert math.isnan(percentile([], 50))


def test_a_goal_is_met_at_its_limit() -> None:
    assert Goal("p50_ms", "≤", 2.5).met(2.5)
    assert not Goal("p50_ms", "≤", 2.5).met(2.6)
    assert not Goal("texts_per_s", "≥", 100).met(99)


def test_vectors_of_both_encodings_are_looked_into() -> None:
    assert check_answer(answer([1.0, 2.0, 3.0], encoding="base64"), QUERY) == {3}
    assert check_answer(answer([1.0, 2.0], [1.0, 2.0, 3.0]), PAIR) == {2, 3}


@pytest.mark.parametrize("vector", [[1.0, math.nan], [0.0, 0.0]], ids=["not finite", "zero"])
def test_a_vector_without_meaning_is_refused(vector: list[float]) -> None:
    with pytest.raises(LoadError, match="not finite, or 0 everywhere"):
        check_answer(answer(vector, encoding="base64"), QUERY)


def test_an_answer_with_too_few_vectors_is_refused() -> None:
    with pytest.raises(LoadError, match="one vector a text"):
        check_answer(answer([1.0, 2.0]), PAIR)


def test_the_token_count_is_found_where_an_answer_was_cut_in_two() -> None:
    whole = answer([1.0, 2.0])
    tally = Tally()

    tally.add(0.1, [whole[:-30], whole[-30:]])

    assert tally.num_tokens == 7
    assert tally.samples == [whole]


def test_the_first_second_fourth_and_eighth_answers_are_kept() -> None:
    tally = Tally()

    for _ in range(9):
        tally.add(0.1, [answer([1.0])])

    assert len(tally.samples) == 4


def test_a_report_adds_up_what_all_processes_saw() -> None:
    one, two = Tally(seconds=2.0, cpu_s=0.5), Tally(seconds=2.0, cpu_s=0.3, errors=Counter({"503": 1}))
    for latency_s in (0.010, 0.030):
        one.add(latency_s, [answer([1.0, 2.0], [3.0, 4.0])])
    two.add(0.020, [answer([1.0, 2.0], [3.0, 4.0])])

    report = summarize([one, two], PAIR)

    assert report.requests_per_s == 1.5
    assert report.texts_per_s == 3.0
    assert report.tokens_per_s == 10.5
    assert report.p50_ms == 20.0
    assert report.client_cores == pytest.approx(0.4)
    assert report.errors == {"503": 1}
    assert report.dimensions == [2]


def test_a_request_has_the_length_of_its_body() -> None:
    target = Target("127.0.0.1", 80, "/v1/embeddings", "m")

    head, _, body = target.request([b"one", b"two"], "base64").partition(b"\r\n\r\n")

    assert json.loads(body) == {"model": "m", "encoding_format": "base64", "input": ["one", "two"]}
    assert head.endswith(b"Content-Length: %d" % len(body))


async def test_an_answer_may_arrive_in_pieces() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"!")
        for piece in (b"HTTP/1.1 429 Too", b" Many\r\nContent-Length: 6\r\n", b"\r\nabc", b"def"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)

    status = await connection.ask(b"hello!")

    assert status == 429
    assert b"".join(connection.chunks) == b"abcdef"
    server.close()
