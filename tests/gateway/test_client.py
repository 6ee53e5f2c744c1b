"""SchedulerClient against the real scheduler and an oracle worker, on real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from common.errors import DeadlineExceeded, InternalError, NonfiniteOutput, ShuttingDown, Unavailable
from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import Batch, BatchFailed, Result
from common.wire.rows import INT8
from common.wire.transport import now_ns
from gateway.client import SchedulerClient
from gateway.open_request import Embedded, Options
from tests.fakes import (
    DIMENSIONS,
    FACTS,
    QUANTISING_FACTS,
    FakeWorker,
    RunningScheduler,
    oracle_result,
    oracle_row,
    oracle_vector,
)

SECOND = 1_000_000_000
Sequences = list[np.ndarray]
StartWorker = Callable[..., FakeWorker]


def sequences(*lengths: int) -> Sequences:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, 30_000, length, dtype=np.int32) for length in lengths]


async def submit(
    client: SchedulerClient,
    rows: Sequences,
    *,
    timeout_s: float = 30,
    dimensions: int = DIMENSIONS,
    encoding: str = "float32",
    type_starts: list[int] | None = None,
    spans: list[np.ndarray] | None = None,
) -> Embedded:
    deadline_ns = now_ns() + int(timeout_s * SECOND)
    options = make_options(dimensions, deadline_ns, encoding)
    return await client.submit(rows, options, type_starts=type_starts, spans=spans)


def make_options(dimensions: int, deadline_ns: int = 10**15, encoding: str = "float32") -> Options:
    return Options(
        fingerprint=FACTS.fingerprint,
        dimensions=dimensions,
        normalize=True,
        encoding=encoding,
        lane="online",
        deadline_ns=deadline_ns,
    )


def assert_answers(embedded: Embedded, texts: Sequences, encoding: str, dimensions: int = DIMENSIONS) -> None:
    """The rows are the oracle's, in the type of their encoding."""
    expected = np.stack([oracle_row(ids, encoding, dimensions) for ids in texts])
    assert embedded.rows.dtype == expected.dtype
    np.testing.assert_array_equal(embedded.rows, expected)


def make_spans(*ends: tuple[int, int]) -> np.ndarray:
    return np.array(ends, dtype=np.int32)


@pytest.fixture
async def client(
    run_dir: str, start_scheduler: Callable[[], RunningScheduler], metrics: Metrics
) -> AsyncIterator[SchedulerClient]:
    start_scheduler()
    client = SchedulerClient(run_dir, "gateway-0", metrics)
    client.start()
    yield client
    await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_rows_come_back_in_the_order_of_the_sequences(start_worker: StartWorker, client: SchedulerClient) -> None:
    start_worker()
    await until(lambda: client.readiness().status == "ready")
    texts = sequences(*range(1, 60))
    embedded = await submit(client, texts)
    np.testing.assert_array_equal(embedded.rows, [oracle_vector(ids) for ids in texts])
    assert embedded.step_us >= 1000


async def test_many_requests_at_once_each_get_their_own_rows(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    workers = [start_worker("worker-0"), start_worker("worker-1")]
    await until(lambda: client.readiness().workers_ready == 2)
    requests = [sequences(*(1 + (i * j) % 60 for j in range(1, 1 + i % 7))) for i in range(1, 64) if i % 7]
    answers = await asyncio.gather(*(submit(client, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer.rows, [oracle_vector(ids) for ids in request])
    assert all(worker.batches for worker in workers)


async def test_only_the_asked_dimensions_come_back(start_worker: StartWorker, client: SchedulerClient) -> None:
    start_worker()
    await until(lambda: client.facts is not None)
    (ids,) = sequences(5)
    embedded = await submit(client, [ids], dimensions=3)
    np.testing.assert_array_equal(embedded.rows, [oracle_vector(ids, 3)])


@pytest.mark.parametrize("encoding", ["int8", "binary"])
async def test_quantised_rows_come_back_in_their_own_type_at_the_asked_dimensions(
    start_worker: StartWorker, client: SchedulerClient, encoding: str
) -> None:
    start_worker(facts=QUANTISING_FACTS)
    await until(lambda: client.facts is not None)
    texts = sequences(*range(1, 30))
    assert_answers(await submit(client, texts, encoding=encoding), texts, encoding)
    assert_answers(await submit(client, texts, encoding=encoding, dimensions=8), texts, encoding, 8)


async def test_different_encodings_share_a_batch_and_each_request_gets_its_own(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    released = threading.Event()
    worker = start_worker(facts=QUANTISING_FACTS, released=released)
    await until(lambda: client.facts is not None)
    texts = [sequences(length, length + 1) for length in range(1, 9)]
    encodings = ["float32", "int8", "binary", "float32", "binary", "int8", "binary", "int8"]
    tasks = [
        asyncio.ensure_future(submit(client, rows, encoding=encoding))
        for rows, encoding in zip(texts, encodings, strict=True)
    ]
    await until(lambda: bool(worker.batches))
    await asyncio.sleep(0.05)  # the others wait at the scheduler by then, and will run at once
    released.set()
    answers = await asyncio.gather(*tasks)
    for embedded, rows, encoding in zip(answers, texts, encodings, strict=True):
        assert_answers(embedded, rows, encoding)
    assert max(len(set(batch.encodings.tolist())) for batch in worker.batches) == 3


async def test_an_int8_request_that_a_worker_died_with_runs_on_another_and_is_int8(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    mute = start_worker("worker-0", facts=QUANTISING_FACTS, answer=lambda _: None)
    await until(lambda: client.facts is not None)
    texts = sequences(5, 6)
    task = asyncio.ensure_future(submit(client, texts, encoding="int8"))
    await until(lambda: bool(mute.batches))
    second = start_worker("worker-1", facts=QUANTISING_FACTS)
    mute.process.kill()
    assert_answers(await task, texts, "int8")
    assert second.batches[0].encodings.tolist() == [INT8, INT8]


async def test_each_span_of_a_sequence_makes_a_row_next_to_requests_without_any(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    start_worker()
    await until(lambda: client.facts is not None)
    texts = sequences(*[20] * 30)
    spans = [make_spans(*((start, start + 5) for start in range(index % 4 + 1))) for index in range(30)]
    plain = sequences(7, 8)
    spanned, whole = await asyncio.gather(submit(client, texts, spans=spans), submit(client, plain))
    expected = [
        oracle_row(ids, "float32", span=tuple(span))
        for ids, own in zip(texts, spans, strict=True)
        for span in own.tolist()
    ]
    np.testing.assert_array_equal(spanned.rows, expected)
    assert_answers(whole, plain, "float32")


async def test_where_the_second_text_of_a_pair_begins_travels_with_its_sequence(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    start_worker()
    await until(lambda: client.facts is not None)
    texts = sequences(*[20] * 30)
    type_starts = list(range(20)) + [20] * 10
    embedded = await submit(client, texts, type_starts=type_starts)
    expected = [oracle_row(ids, "float32", type_start=start) for ids, start in zip(texts, type_starts, strict=True)]
    np.testing.assert_array_equal(embedded.rows, expected)


async def test_sparse_rows_of_many_batches_come_back_in_one_matrix(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    start_worker()
    await until(lambda: client.facts is not None)
    texts = sequences(*[20] * 30)
    embedded = await submit(client, texts, encoding="sparse")
    expected = [oracle_row(ids, "sparse").tobytes() for ids in texts]
    assert embedded.rows.dtype == np.uint8
    assert [row.tobytes()[: len(own)] for row, own in zip(embedded.rows, expected, strict=True)] == expected


async def test_spans_that_do_not_fit_fail_their_caller_and_leave_nothing_behind(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    start_worker()
    await until(lambda: client.facts is not None)
    texts = sequences(*[40] * 3)
    with pytest.raises(ValueError, match="span"):
        await submit(client, texts, spans=[make_spans((0, 40)), make_spans((0, 41)), make_spans((0, 40))])
    assert client._ledger.num_pieces == 0
    await submit(client, texts)


async def test_facts_are_announced_when_the_first_worker_is_ready(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    heard = []
    client.on_facts = heard.append
    assert client.readiness().status == "starting"
    start_worker()
    await until(lambda: bool(heard))
    assert heard == [FACTS]


async def test_without_any_worker_ever_a_request_is_503(client: SchedulerClient) -> None:
    with pytest.raises(Unavailable) as raised:
        await submit(client, sequences(3))
    assert raised.value.retry_after_s == 1


async def test_a_deadline_is_kept_while_the_worker_says_nothing(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    start_worker(answer=lambda _: None)
    await until(lambda: client.facts is not None)
    async with asyncio.timeout(10):  # sooner than the scheduler gives the worker up, and has the request expire
        with pytest.raises(DeadlineExceeded):
            await submit(client, sequences(3), timeout_s=0.1)


async def test_a_cancelled_caller_cancels_what_is_queued(start_worker: StartWorker, client: SchedulerClient) -> None:
    worker = start_worker(answer=lambda _: None)
    await until(lambda: client.facts is not None)
    running = [asyncio.ensure_future(submit(client, sequences(3)))]
    await until(lambda: len(worker.batches) == 1)
    running.append(asyncio.ensure_future(submit(client, sequences(3))))
    await until(lambda: len(worker.batches) == 2)
    waiting = asyncio.ensure_future(submit(client, sequences(7)))
    await asyncio.sleep(0.05)
    for task in (*running, waiting):
        task.cancel()
    await asyncio.gather(*running, waiting, return_exceptions=True)
    second = start_worker("worker-1")
    await until(lambda: client.readiness().workers_ready == 2)
    await submit(client, sequences(9))
    assert [batch.lengths.tolist() for batch in second.batches] == [[9]]


async def test_a_nonfinite_row_names_its_sequence(start_worker: StartWorker, client: SchedulerClient) -> None:
    def answer(batch: Batch) -> Result:
        bad = [index for index, length in enumerate(batch.lengths) if length == 5]
        return dataclasses.replace(oracle_result(batch), nonfinite=np.array(bad, dtype=np.int32))

    start_worker(answer=answer)
    await until(lambda: client.facts is not None)
    with pytest.raises(NonfiniteOutput) as raised:
        await submit(client, sequences(*[40] * 6, 5, 40))
    assert raised.value.sequence == 6
    await submit(client, sequences(3))


async def test_a_step_that_always_raises_is_500_and_the_next_request_is_served(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    def answer(batch: Batch) -> Message:
        if 5 in batch.lengths:
            return BatchFailed(batch.epoch, batch.batch_id, "raised")
        return oracle_result(batch)

    start_worker(answer=answer)
    await until(lambda: client.facts is not None)
    with pytest.raises(InternalError):
        await submit(client, sequences(5))
    await submit(client, sequences(3))


async def test_when_a_workers_process_dies_its_batch_runs_on_another(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    mute = start_worker("worker-0", answer=lambda _: None)
    await until(lambda: client.facts is not None)
    (ids,) = sequences(5)
    task = asyncio.ensure_future(submit(client, [ids]))
    await until(lambda: bool(mute.batches))
    start_worker("worker-1")
    mute.process.kill()
    embedded = await task
    np.testing.assert_array_equal(embedded.rows, [oracle_vector(ids)])


async def test_what_a_dead_scheduler_held_is_answered_through_the_next(
    run_dir: str, start_scheduler: Callable[[], RunningScheduler], start_worker: StartWorker, metrics: Metrics
) -> None:
    first = start_scheduler()
    client = SchedulerClient(run_dir, "gateway-0", metrics)
    client.start()
    mute = start_worker(answer=lambda _: None)
    await until(lambda: client.facts is not None)
    texts = sequences(*[30] * 20)
    task = asyncio.ensure_future(submit(client, texts))
    await until(lambda: bool(mute.batches))
    mute.close()
    first.close()
    start_scheduler()
    start_worker()
    embedded = await task
    np.testing.assert_array_equal(embedded.rows, [oracle_vector(ids) for ids in texts])
    await client.close()


async def test_a_client_that_is_closed_as_a_request_comes_sends_nothing_more_and_says_why(
    run_dir: str, start_scheduler: Callable[[], RunningScheduler], start_worker: StartWorker, metrics: Metrics
) -> None:
    start_scheduler()
    worker = start_worker()
    client = SchedulerClient(run_dir, "gateway-0", metrics)
    client.start()
    await until(lambda: client.readiness().status == "ready")
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    task = asyncio.ensure_future(submit(client, sequences(3)))
    await asyncio.sleep(0)  # it has been opened, and would leave with the end of this turn of the loop
    await client.close()
    with pytest.raises(ShuttingDown):
        await task
    assert failed == []
    assert worker.batches == []


async def test_callers_of_one_turn_of_the_loop_run_in_one_batch(
    start_worker: StartWorker, client: SchedulerClient
) -> None:
    worker = start_worker()
    await until(lambda: client.readiness().status == "ready")
    texts = sequences(3, 4, 5, 6)
    answers = await asyncio.gather(*(submit(client, [text]) for text in texts))
    assert [batch.lengths.tolist() for batch in worker.batches] == [[3, 4, 5, 6]]
    for text, answer in zip(texts, answers, strict=True):
        assert_answers(answer, [text], "float32")
