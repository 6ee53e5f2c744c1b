"""What bad input is answered with: every case of bad_input.toml.

Each goes over a real socket to a real gateway, in the scene that it names; afterwards the same gateway must still
serve.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from common.metrics import Metrics
from common.wire.codec import Message
from common.wire.messages import Batch, BatchFailed, ModelFacts, Result
from gateway.edge.auth import KeyCheck, known_keys
from tests.fakes import DIMENSIONS as ORACLE_DIMENSIONS
from tests.fakes import FakeWorker, oracle_result
from tests.gateway.bad_input import PAGE, Case, found_at, page, read_table
from tests.gateway.conftest import VOCAB_SIZE, Running, Serve, ServeOracle, Stub
from tests.gateway.wire import Answer, Wire, ask, embed, request_bytes

CANARY = "canary-7f3a"  # stands in many of the requests, and may stand in no answer
TABLE = read_table()
W9 = 13  # its token id

# These wait: for a gateway's own time limits, or for a scheduler to tell how much there is to do.
SLOW_SCENES = {"short times", "full queue"}


@dataclasses.dataclass(frozen=True)
class Request:
    target: str
    body: bytes
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


GOOD_TEXT = Request("/v1/embeddings", b'{"input":"w1"}')
GOOD_PAIR = Request("/v1/rerank", b'{"query":"w1","documents":["w5"]}')


async def no_more() -> None:
    """There was no trouble."""


@dataclasses.dataclass
class Scene:
    """A gateway in the state that a case needs."""

    port: int
    stub: Stub | None = None  # what stands for scheduler and workers; None where a scheduler is there
    wire: Wire | None = None  # the connection that the case comes over; None: a new one
    good: Request | None = GOOD_TEXT  # a request that is answered when the trouble is over; None: there is no such
    end: Callable[[], Awaitable[None]] = no_more  # of the trouble


@dataclasses.dataclass
class Stage:
    """Sets each scene of bad_input.toml: a method of the scene's name, with underscores."""

    serve: Serve
    facts: ModelFacts
    scoring: ModelFacts
    answering: ModelFacts
    serve_oracle: ServeOracle
    start_worker: Callable[..., FakeWorker]
    metrics: Metrics
    tmp_path: Path

    # --- before a stand-in ---

    async def embeddings(self, **changes: object) -> Scene:
        small = {"max_inputs": 20, "max_body_bytes": 1_000_000, "max_request_tokens": 200, "body_timeout_s": 5}
        return _of(await self.serve(**small | changes))

    async def usual_limits(self) -> Scene:
        return _of(await self.serve())

    async def fewer_vectors_than_tokens(self) -> Scene:
        return await self.embeddings(served=dataclasses.replace(self.facts, vocab_size=VOCAB_SIZE - 1))

    async def scores(self, *, facts: ModelFacts | None = None) -> Scene:
        scene = await self.embeddings(served=facts or self.scoring)
        scene.stub.logit_of = lambda ids: ids[-2] - 4
        scene.good = GOOD_PAIR
        return scene

    async def scores_by_template(self) -> Scene:
        return await self.scores(facts=self.answering)

    async def a_key(self) -> Scene:
        scene = await self.embeddings(api_key="sesame")
        scene.good = dataclasses.replace(GOOD_TEXT, headers={"Authorization": "Bearer sesame"})
        return scene

    async def keys(self) -> Scene:
        file = self.tmp_path / "keys"
        file.touch(0o600)
        file.write_text("sesame\nnightly lane=backfill\nsmall tokens_per_minute=4\n")
        scene = await self.embeddings(keys=KeyCheck(known_keys(str(file), None)))
        scene.good = dataclasses.replace(GOOD_TEXT, headers={"x-api-key": "sesame"})
        assert (await embed(scene.port, {"input": "w1"}, {"x-api-key": "small"})).status == 200
        scene.stub.submitted.clear()
        return scene

    async def pages(self) -> Scene:
        return await self.embeddings(cors_origins="https://app.example.org")

    async def short_times(self) -> Scene:
        return await self.embeddings(header_timeout_s=1, body_timeout_s=1)

    async def busy(self) -> Scene:
        scene = await self.embeddings()
        scene.stub.gate.clear()

        async def end() -> None:
            scene.stub.gate.set()

        scene.end = end
        return scene

    async def stopping(self) -> Scene:
        running = await self.serve()
        wire = await Wire.connect(running.port)
        assert (await wire.ask(request_bytes("GET", "/health"))).status == 200
        drained = asyncio.ensure_future(running.gateway.drain())
        await asyncio.sleep(0)

        async def end() -> None:
            await drained

        return Scene(running.port, running.stub, wire, None, end)

    async def no_worker(self) -> Scene:
        running = await self.serve(served=None)
        return Scene(running.port, running.stub, good=None)

    async def a_bug(self) -> Scene:
        scene = await self.embeddings()
        scene.stub.error = ZeroDivisionError(CANARY)

        async def end() -> None:
            scene.stub.error = None

        scene.end = end
        return scene

    # --- before a real scheduler ---

    async def a_small_budget(self) -> Scene:
        return await self._scheduled(oracle_result, facts=self._oracle(max_batch_tokens=8))

    async def slow_worker(self) -> Scene:
        released = threading.Event()
        scene = await self._scheduled(oracle_result, released=released)

        async def end() -> None:
            released.set()

        scene.end = end
        return scene

    async def full_queue(self) -> Scene:
        released = threading.Event()
        workers: list[FakeWorker] = []
        facts = self._oracle(max_batch_tokens=16_384)
        scene = await self._scheduled(oracle_result, facts=facts, workers=workers, released=released)
        # Two such requests go into the worker's hands; of the two that wait each is a whole step. One after the other:
        # before anything is measured, a third that comes with them is refused.
        waiting = []
        async with asyncio.timeout(10):
            for num_tokens in range(16_384, 4 * 16_384 + 1, 16_384):
                waiting.append(asyncio.ensure_future(embed(scene.port, {"input": [[5] * 16] * 1024})))
                while sum(len(batch.token_ids) for batch in workers[0].batches) + self._queued_tokens() < num_tokens:
                    await asyncio.sleep(0.01)

        async def end() -> None:
            released.set()
            assert [(await answer).status for answer in waiting] == [200] * 4

        scene.end = end
        return scene

    async def not_finite(self) -> Scene:
        def answer(batch: Batch) -> Result:
            sequences = np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])
            bad = np.flatnonzero([W9 in sequence for sequence in sequences]).astype(np.int32)
            return dataclasses.replace(oracle_result(batch), nonfinite=bad)

        return await self._scheduled(answer)

    async def failing(self) -> Scene:
        def answer(batch: Batch) -> Message:
            if W9 in batch.token_ids:
                return BatchFailed(batch.epoch, batch.batch_id, CANARY)
            return oracle_result(batch)

        return await self._scheduled(answer)

    async def short_of_memory(self) -> Scene:
        def answer(batch: Batch) -> Message:
            sequences = np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])
            large = next((place for place, ids in enumerate(sequences) if list(ids).count(W9) == 2), None)
            if large is not None:
                return BatchFailed(batch.epoch, batch.batch_id, CANARY, large)
            return oracle_result(batch)

        return await self._scheduled(answer)

    async def deadly(self) -> Scene:
        workers: list[FakeWorker] = []

        def answer_of(index: int) -> Callable[[Batch], Message | None]:
            def answer(batch: Batch) -> Message | None:
                if W9 not in batch.token_ids:
                    return oracle_result(batch)
                workers[index].mute()  # else its thread would introduce the dead process again
                workers[index].process.kill()
                return None

            return answer

        facts = self._oracle()
        scene = await self._scheduled(answer_of(0), facts=facts, workers=workers)
        workers += [self.start_worker(f"worker-{index}", facts=facts, answer=answer_of(index)) for index in (1, 2, 3)]
        return scene

    async def _scheduled(
        self,
        answer: Callable[[Batch], Message | None],
        *,
        facts: ModelFacts | None = None,
        workers: list[FakeWorker] | None = None,
        released: threading.Event | None = None,
    ) -> Scene:
        """Before a scheduler and a worker, which is added to `workers`."""
        oracle = await self.serve_oracle(facts or self._oracle(), answer=answer, released=released)
        if workers is not None:
            workers.append(oracle.worker)
        return Scene(oracle.port)

    def _oracle(self, max_batch_tokens: int = 64) -> ModelFacts:
        return dataclasses.replace(self.facts, dimensions=ORACLE_DIMENSIONS, max_batch_tokens=max_batch_tokens)

    def _queued_tokens(self) -> float:
        [metric] = self.metrics.queued_tokens.collect()
        return metric.samples[0].value


def _of(running: Running) -> Scene:
    return Scene(running.port, running.stub)


@pytest.fixture
def stage(
    serve: Serve,
    facts: ModelFacts,
    scoring: ModelFacts,
    answering: ModelFacts,
    serve_oracle: ServeOracle,
    start_worker: Callable[..., FakeWorker],
    metrics: Metrics,
    tmp_path: Path,
) -> Stage:
    return Stage(serve, facts, scoring, answering, serve_oracle, start_worker, metrics, tmp_path)


def _marked(case: Case) -> object:
    marks = [pytest.mark.slow] if case.scene in SLOW_SCENES else []
    if case.needs:
        marks += [pytest.mark.xfail(reason=f"it needs {case.needs}", strict=True), pytest.mark.slow]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in TABLE.cases])
async def test_bad_input(stage: Stage, case: Case) -> None:
    scene: Scene = await getattr(stage, case.scene.replace(" ", "_"))()
    wire = scene.wire or await Wire.connect(scene.port)
    try:
        await wire.send(case.sent)
        if case.leaves:
            await leave(wire, scene, stage.metrics)
        elif case.answers:
            answers = [await wire.answer() for _ in case.answers]
            assert [answer.status for answer in answers] == [case.status] * len(answers)
            assert [answer.headers["x-request-id"] for answer in answers] == list(case.answers)
        elif case.status is not None:
            check_answer(case, await wire.answer())
        if case.closes:
            assert await wire.rest() == b""
    finally:
        await wire.close()
        await scene.end()
    if scene.stub is not None and case.code is not None and case.scene != "a bug":
        assert scene.stub.submitted == []
    if scene.good is not None:
        after = await ask(scene.port, "POST", scene.good.target, scene.good.body, scene.good.headers)
        assert after.status == 200, "the gateway must go on serving"


def check_answer(case: Case, answer: Answer) -> None:
    assert (answer.version, answer.status) == ("HTTP/1.1", case.status), answer.body
    assert {"x-request-id", "server-timing"} <= answer.headers.keys()
    for name, value in case.answer_headers.items():
        if value == "-":
            assert name not in answer.headers
        else:
            assert re.fullmatch(value, answer.headers[name]), answer.headers[name]
    for place, value in case.holds.items():
        assert found_at(place, answer.json) == value
    if case.closes:
        assert answer.headers["connection"] == "close"
    if case.code is not None:
        check_error(case, answer)


def check_error(case: Case, answer: Answer) -> None:
    assert answer.json.keys() == {"error", "detail"}
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert answer.json["detail"] == answer.error["message"]
    assert (answer.error["type"], answer.error["code"], answer.error["param"]) == (case.type, case.code, case.param)
    assert answer.headers["content-type"] == "application/json"
    # 429 and 503 say when; the rest of these a client may try again at once.
    assert answer.headers.get("x-should-retry") == (None if case.status in (408, 429, 503, 504, 505) else "false")
    assert ("retry-after" in answer.headers) == (case.status in (429, 503))
    assert CANARY not in answer.body.decode() + str(answer.headers)


async def leave(wire: Wire, scene: Scene, metrics: Metrics) -> None:
    """Close while the request runs, and see it cancelled and counted."""
    count = metrics.requests.labels("/v1/embeddings", 499)
    before = count._value.get()
    async with asyncio.timeout(5):
        await scene.stub.entered.wait()
        await wire.close()
        await scene.stub.cancelled.wait()
        await asyncio.sleep(0)
    assert count._value.get() == before + 1


# --- the table itself ---


def test_every_row_is_there_and_has_cases() -> None:
    assert [row.number for row in TABLE.rows] == list(range(1, 81))
    assert all(row.cases for row in TABLE.rows)


def test_cases_of_a_row_have_names_of_their_own() -> None:
    assert len({str(case) for case in TABLE.cases}) == len(TABLE.cases)


def test_every_scene_is_described_and_used() -> None:
    assert {case.scene for case in TABLE.cases} == TABLE.scenes.keys()
    assert all(callable(getattr(Stage, name.replace(" ", "_"))) for name in TABLE.scenes)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(TABLE), "run `python -m tests.gateway.bad_input`"


# --- what is more than one request ---


@pytest.mark.parametrize(
    ("inputs", "param"), [("w1 w59", "input"), (["w1", "w59"], "input[1]"), (["w1"] * 100 + ["w59"], "input[100]")]
)
async def test_a_token_that_the_model_has_no_vector_for_is_the_error_of_its_own_request(
    serve: Serve, facts: ModelFacts, inputs: str | list[str], param: str
) -> None:
    running = await serve(served=dataclasses.replace(facts, vocab_size=VOCAB_SIZE - 1))
    good = [embed(running.port, {"input": f"w{index}"}) for index in range(8)]
    bad, *others = await asyncio.gather(embed(running.port, {"input": inputs}), *good)
    assert bad.refusal == (400, "invalid_token_id", param)
    assert bad.error["message"] == f"{param} holds the token w59, which this model has no vector for."
    assert [answer.status for answer in others] == [200] * 8
