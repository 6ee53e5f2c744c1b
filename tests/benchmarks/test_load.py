"""What the load generator makes of answers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import multiprocessing
import struct
from collections import Counter

import pytest
from hdrh.histogram import HdrHistogram

from benchmarks.arrivals import Arrivals
from benchmarks.clients import Clients, Connection, Goal, Load, LoadError, Plan, Tally, Target
from benchmarks.load import Report, check_answer, percentile, summarize
from benchmarks.texts import Lines

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


async def test_an_answer_in_chunks_is_put_together() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"!")
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for piece in (head, b"3\r\nabc\r\nA;x=y\r\ndefgh", b"ijklm\r\n0\r\n", b"\r\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)

    assert await connection.ask(b"hello!") == 200
    assert connection.chunks == [b"abcdefghijklm"]
    server.close()


def test_a_rerank_request_asks_for_a_querys_scores_of_documents() -> None:
    target = Target("127.0.0.1", 80, "/v1/embeddings", "m", api_key="k", fields={"top_n": 2})

    head, _, body = target.request([b"q", b"one", b"two"], "base64", "rerank").partition(b"\r\n\r\n")

    assert head.startswith(b"POST /v1/rerank HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in head
    assert json.loads(body) == {"model": "m", "top_n": 2, "query": "q", "documents": ["one", "two"]}


def scores(*values: float, key: str = "results") -> bytes:
    results = [{"index": index, "relevance_score": value} for index, value in enumerate(values)]
    return json.dumps({key: results[::-1]}).encode()


def test_scores_are_looked_into_in_whatever_order_they_come() -> None:
    rerank = Load("rerank", 1, "rerank", texts_per_request=2)

    assert check_answer(scores(0.5, 0.7), rerank) == check_answer(scores(0.5, 0.7, key="data"), rerank) == set()
    with pytest.raises(LoadError, match="one score a document"):
        check_answer(scores(0.5), rerank)
    with pytest.raises(LoadError, match="not finite"):
        check_answer(scores(0.5, math.inf), rerank)


def test_one_answer_in_sixteen_is_asked_where_its_time_went() -> None:
    tally = Tally(seconds=4.0)

    for milliseconds in range(32):
        header = b"HTTP/1.1 200 OK\r\nServer-Timing: queue;dur=%d.5, step;dur=2, total;dur=9" % milliseconds
        tally.add(0.1, [answer([1.0])], header, after_s=milliseconds / 10)

    assert (dict(tally.stages_ms), tally.num_timed) == ({"queue": 17.0, "step": 4.0}, 2)
    assert tally.by_second == {0: 10, 1: 10, 2: 10, 3: 2}
    assert summarize([tally], QUERY).stages_ms == {"queue": 8.5, "step": 2.0}


def test_a_report_counts_latencies_between_edges_and_for_hdrhistogram() -> None:
    tally = Tally(seconds=1.0)
    for latency_s in (0.010, 0.0101, 0.5):
        tally.add(latency_s, [answer([1.0])])

    report = summarize([tally], QUERY)

    assert [count for *_, count in report.bins if count] == [2, 1]
    assert report.bins[0][0] <= 10.0 < report.bins[0][1]
    assert (report.p999_ms, report.max_ms, report.rate) == (500.0, 500.0, None)
    decoded = HdrHistogram.decode(report.hdr)
    assert decoded.get_total_count() == 3
    assert decoded.get_value_at_percentile(50) == pytest.approx(10_100, rel=1e-3)


# --- the loops ---


async def run_clients(load: Load, num_held: int, measured_s: float, due_s: list[float]) -> tuple[Report, list[str]]:
    """Clients of a server that holds its answers until so many requests' worth of them is due; what was asked."""
    asked: list[str] = []
    handlers: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        body = answer([1.0], encoding="base64")
        while head := await reader.readline():
            length = 0
            while head.strip():
                length = int(head.split()[1]) if head.lower().startswith(b"content-length") else length
                head = await reader.readline()
            asked.append(json.loads(await reader.readexactly(length))["input"])
            if len(asked) == 1:
                await asyncio.sleep(due_s[num_held] if num_held else 0)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    target = Target(host, port, "/v1/embeddings", "m")
    lines = Lines(map(str, range(100)))
    plan = Plan(load, target, lines, {"query": 1, "document": 1}, load.num_clients, 0, 1, 0.0, measured_s, due_s)
    tally = await Clients(plan).run(multiprocessing.get_context("spawn").Barrier(1))
    await asyncio.gather(*filter(None, handlers))
    server.close()
    return summarize([tally], load), asked


@pytest.mark.slow
async def test_who_was_due_while_the_server_stood_still_has_waited_since_then() -> None:
    due_s = [index / 50 for index in range(20)]
    load = Load("open", 1, "query", arrivals=Arrivals("poisson", 50))

    report, asked = await run_clients(load, num_held=15, measured_s=0.4, due_s=due_s)

    assert asked == [str(index) for index in range(20)]
    assert (report.answers, report.errors) == (20, {})
    assert report.rate == pytest.approx(50, rel=0.2)
    # The first one took 300 ms, and who came 100 ms later 200 ms, though the server had each of the others for no time.
    assert report.max_ms > 290
    assert report.p50_ms > 90


@pytest.mark.slow
async def test_what_is_due_before_measuring_begins_does_not_count() -> None:
    load = Load("open", 4, "query", arrivals=Arrivals("poisson", 50))

    report, asked = await run_clients(load, num_held=0, measured_s=0.1, due_s=[0.0, 0.02, 0.5])

    assert len(asked) == 3
    assert report.answers == 2
    assert report.late_p99_ms is not None
