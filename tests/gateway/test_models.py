"""Several models behind one gateway: who is meant, what is told of all, and that none is harmed by another."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from common.config import GatewayConfig
from common.metrics import Metrics
from common.wire.messages import Batch, ModelFacts, Result
from gateway.app import Gateway
from gateway.client import SchedulerClient
from gateway.status import Readiness
from tests.browser import Browser
from tests.fakes import FACTS, FakeWorker, RunningScheduler, oracle_row
from tests.gateway.conftest import Serve, Stub, listening_socket, vector, with_tokenizer
from tests.gateway.wire import Answer, Wire, ask, embed, request_bytes

NARROW = 8  # dimensions of the model B


@pytest.fixture(scope="module")
def other(facts: ModelFacts, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """B: other words (v0 … v9, from 0 on and in no frame), fewer dimensions and a shorter limit than A."""
    tokenizer = Tokenizer(models.WordLevel({f"v{index}": index for index in range(10)} | {"[UNK]": 10}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("other")
    changes = {"name": "B", "dimensions": NARROW, "max_tokens": 4, "vocab_size": 11, "prompts": {}}
    return with_tokenizer(facts, tokenizer, folder, fingerprint="b" * 16, **changes)


@dataclasses.dataclass
class Two:
    """A gateway with the models A and B, whose schedulers' clients answer by themselves."""

    port: int
    gateway: Gateway
    a: Stub
    b: Stub


ServeTwo = Callable[..., Awaitable[Two]]


@pytest.fixture
async def serve_two(facts: ModelFacts, other: ModelFacts, metrics: Metrics, run_dir: str) -> AsyncIterator[ServeTwo]:
    running: list[Two] = []
    (Path(run_dir) / "metrics").mkdir(parents=True)

    async def start(*, served: ModelFacts | None = other, **changes: int) -> Two:
        a, b = Stub(dataclasses.replace(facts, name="A"), "A"), Stub(served, "B")
        gateway = Gateway(GatewayConfig(run_dir=run_dir, **changes), [a, b], metrics)
        sock = listening_socket()
        two = Two(sock.getsockname()[1], gateway, a, b)
        await gateway.start(sock)
        running.append(two)
        await gateway.wait_loaded()
        return two

    yield start
    for two in running:
        await two.gateway.close()


@pytest.fixture
async def two(serve_two: ServeTwo) -> Two:
    return await serve_two()


def of(answer: Answer) -> tuple[object, int]:
    """Which model answered, in how many dimensions."""
    assert answer.status == 200, answer.body
    return answer.json["model"], len(answer.json["data"][0]["embedding"])


# --- who is meant ---


@pytest.mark.parametrize(
    ("fields", "headers", "meant"),
    [
        ({"model": "A"}, {}, "A"),
        ({"model": "B"}, {}, "B"),
        ({"model": "some-org/B"}, {}, "B"),
        ({}, {}, "A"),
        ({}, {"X-Model": "B"}, "B"),
        ({}, {"X-Model": "some-org/B"}, "B"),
        ({"model": "A"}, {"X-Model": "B"}, "A"),
    ],
)
async def test_a_request_goes_to_the_model_that_it_names_or_else_the_header_or_else_to_the_first(
    two: Two, fields: dict[str, str], headers: dict[str, str], meant: str
) -> None:
    answer = await embed(two.port, {"input": "w1 v1", **fields}, headers)
    assert of(answer) == {"A": ("A", 12), "B": ("B", NARROW)}[meant]
    asked, not_asked = (two.a, two.b) if meant == "A" else (two.b, two.a)
    # Each tokenizer in its own way: A knows w1 and frames a text, B knows v1 and does not.
    assert [sent["sequences"] for sent in asked.submitted] == [[[1, 5, 0, 2]] if meant == "A" else [[10, 1]]]
    assert not_asked.submitted == []
    assert answer.headers["x-model-fingerprint"] == ("b" * 16 if meant == "B" else FACTS.fingerprint)


async def test_each_model_has_its_own_limits(two: Two) -> None:
    text = "v1 v2 v3 v4 v5"
    refused = await embed(two.port, {"input": text, "model": "B"})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert of(await embed(two.port, {"input": text, "model": "A"})) == ("A", 12)
    refused = await embed(two.port, {"input": "v1", "model": "B", "dimensions": 9})
    assert (refused.status, refused.error["code"]) == (400, "out_of_range")


@pytest.mark.parametrize(
    ("fields", "headers"), [({"model": "C"}, {}), ({}, {"X-Model": "C"}), ({"model": "a"}, {}), ({"model": "A/B/"}, {})]
)
async def test_a_model_that_is_not_served_is_404(two: Two, fields: dict[str, str], headers: dict[str, str]) -> None:
    answer = await embed(two.port, {"input": "w1", **fields}, headers)
    assert answer.refusal == (404, "model_not_found", "model")


@pytest.mark.parametrize(("model", "code"), [("", "missing_field"), (3, "invalid_type"), (["B"], "invalid_type")])
async def test_what_is_no_name_is_refused_as_ever(two: Two, model: object, code: str) -> None:
    assert (await embed(two.port, {"input": "w1", "model": model})).refusal == (400, code, "model")


async def test_teis_routes_are_the_first_models_or_that_of_the_header(two: Two) -> None:
    first = await ask(two.port, "POST", "/embed", b'{"inputs": "w1"}')
    second = await ask(two.port, "POST", "/embed", b'{"inputs": "v1"}', {"X-Model": "B"})
    tokens = await ask(two.port, "POST", "/tokenize", b'{"inputs": "v1"}', {"X-Model": "B"})
    np.testing.assert_allclose(first.json, [vector([1, 5, 2])], rtol=1e-6)
    np.testing.assert_allclose(second.json, [vector([1], dimensions=NARROW)], rtol=1e-6)
    assert [token["id"] for token in tokens.json[0]] == [1]


async def test_one_model_alone_takes_no_heed_of_the_header(serve: Serve) -> None:
    running = await serve()
    assert of(await embed(running.port, {"input": "w1"}, {"X-Model": "other"})) == ("tiny", 12)
    assert (await ask(running.port, "GET", "/ready", headers={"X-Model": "other"})).json["model"] == "tiny"


# --- what is told of all ---


async def test_all_models_are_listed_also_one_that_has_no_worker_yet(serve_two: ServeTwo) -> None:
    two = await serve_two(served=None)
    listed = await ask(two.port, "GET", "/v1/models")
    assert [card["id"] for card in listed.json["data"]] == ["A", "B"]
    assert (await ask(two.port, "GET", "/v1/models/some-org/B")).json["id"] == "B"
    assert (await ask(two.port, "GET", "/v1/models/C")).status == 404


async def test_all_is_ready_where_each_model_is(two: Two) -> None:
    two.b.status = Readiness("ready", 2, 3, "")
    answer = await ask(two.port, "GET", "/ready")
    assert answer.status == 200
    assert answer.json == {
        "status": "ready",
        "workers": {"ready": 3, "total": 4},
        "model": "A",
        "models": {
            "A": {"status": "ready", "workers": {"ready": 1, "total": 1}},
            "B": {"status": "ready", "workers": {"ready": 2, "total": 3}},
        },
    }


async def test_who_is_not_ready_is_named_and_each_can_be_asked_about_alone(two: Two) -> None:
    two.b.status = Readiness("unavailable", 0, 1, "No worker is ready.")
    answer = await ask(two.port, "GET", "/ready")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert (answer.json["status"], answer.json["reason"]) == ("unavailable", "B: No worker is ready.")
    assert [one["status"] for one in answer.json["models"].values()] == ["ready", "unavailable"]
    alone = [await ask(two.port, "GET", "/ready", headers={"X-Model": name}) for name in ("A", "B", "C")]
    assert [one.status for one in alone] == [200, 503, 404]
    assert alone[0].json == {"status": "ready", "workers": {"ready": 1, "total": 1}, "model": "A"}
    assert (await ask(two.port, "GET", "/health")).status == 200


async def test_info_is_of_the_first_or_of_the_one_in_the_header_and_lists_all(two: Two) -> None:
    first = (await ask(two.port, "GET", "/info")).json
    second = (await ask(two.port, "GET", "/info", headers={"X-Model": "B"})).json
    assert (first["model_id"], first["limits"]["max_input_tokens"]) == ("A", 16)
    assert (second["model_id"], second["limits"]["max_input_tokens"]) == ("B", 4)
    assert {name: one["dimensions"] for name, one in first["models"].items()} == {"A": 12, "B": NARROW}


@pytest.mark.slow
async def test_on_the_page_each_model_can_be_chosen_looked_at_and_tried(two: Two, browser: Browser) -> None:
    two.b.status = Readiness("unavailable", 0, 1, "No worker is ready.")
    tab = await browser.tab()
    await tab.open(f"http://127.0.0.1:{two.port}/")
    await tab.until("document.querySelector('h1').innerText === 'A'")
    assert await tab.texts("#state") == ["Cannot serve, 1 of 2 workers. B: No worker is ready."]
    assert await tab.texts("#which option") == ["A", "B"]

    await tab.run("(which => { which.value = 'B'; which.dispatchEvent(new Event('change')); })(byId('which'))")
    await tab.until("document.querySelector('h1').innerText === 'B'")
    facts = dict(zip(await tab.texts("#facts dt"), await tab.texts("#facts dd"), strict=True))
    await tab.fill("#text", "v3")
    await tab.click("#text-form button")
    await tab.until("document.querySelector('#vector-head')")

    assert (facts["Dimensions"], facts["Longest input"]) == (str(NARROW), "4 tokens")
    np.testing.assert_allclose(
        np.array(await tab.texts("#vector-head li"), dtype=float), vector([3], dimensions=NARROW), rtol=1e-6
    )
    assert '"model":"B"' in await tab.run("document.querySelector('#text-outcome .as-curl code').textContent")
    assert two.a.submitted == []
    assert all("503" in text for text in tab.complaints)


# --- none is harmed by another ---


async def test_who_waits_for_one_model_takes_no_place_from_anothers_clients(
    serve_two: ServeTwo,
) -> None:
    two = await serve_two(max_concurrent_requests=4)
    two.a.gate.clear()
    wires = [await Wire.connect(two.port) for _ in range(2)]
    for wire in wires:
        await wire.send(request_bytes("POST", "/v1/embeddings", b'{"input": "w1", "model": "A"}'))
    while len(two.a.submitted) < 2:
        await asyncio.sleep(0)

    refused = await embed(two.port, {"input": "w1", "model": "A"})
    served = await embed(two.port, {"input": "v1", "model": "B"})
    two.a.gate.set()
    answers = [await wire.answer() for wire in wires]
    after = await embed(two.port, {"input": "w1", "model": "A"})

    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert of(served) == ("B", NARROW)
    assert [*map(of, answers), of(after)] == [("A", 12)] * 3
    for wire in wires:
        await wire.close()


# --- through real schedulers ---


def narrow_result(batch: Batch) -> Result:
    """What an oracle of B's dimensions answers."""
    stops = np.cumsum(batch.lengths)
    sequences = np.split(batch.token_ids, stops[:-1])
    rows = np.stack([oracle_row(ids.tolist(), "float32", NARROW).view(np.uint8) for ids in sequences])
    return Result(batch.epoch, batch.batch_id, 0, 1000, True, np.zeros(0, dtype=np.int32), rows)


@dataclasses.dataclass
class Peers:
    port: int
    schedulers: dict[str, RunningScheduler]
    workers: dict[str, FakeWorker]


@pytest.fixture
async def peers(run_dir: str, metrics: Metrics, facts: ModelFacts, other: ModelFacts) -> AsyncIterator[Peers]:
    (Path(run_dir) / "metrics").mkdir(parents=True)
    served = {"A": dataclasses.replace(facts, name="A", dimensions=FACTS.dimensions), "B": other}
    schedulers = {name: RunningScheduler(f"{run_dir}/{name}", metrics) for name in served}
    workers = {
        name: FakeWorker(f"{run_dir}/{name}", facts=found, answer=narrow_result if name == "B" else None)
        for name, found in served.items()
    }
    clients = [SchedulerClient(f"{run_dir}/{name}", "gateway-0", metrics, model=name) for name in served]
    gateway = Gateway(GatewayConfig(run_dir=run_dir), clients, metrics)
    sock = listening_socket()
    await gateway.start(sock)
    peers = Peers(sock.getsockname()[1], schedulers, workers)
    await until_ready(peers.port, 200)
    yield peers
    await gateway.close()
    for peer in [*workers.values(), *schedulers.values()]:
        peer.close()


async def until_ready(port: int, status: int) -> Answer:
    async with asyncio.timeout(20):
        while (answer := await ask(port, "GET", "/ready")).status != status:
            await asyncio.sleep(0.005)
    return answer


async def ask_both(port: int, number: int) -> list[list[float]]:
    answers = await asyncio.gather(
        embed(port, {"input": f"w{number % 50}", "model": "A"}), embed(port, {"input": f"v{number % 10}", "model": "B"})
    )
    return [answer.json["data"][0]["embedding"] for answer in answers]


async def test_each_model_gets_its_own_sequences_and_gives_its_own_rows(peers: Peers) -> None:
    found = await asyncio.gather(*(ask_both(peers.port, number) for number in range(40)))
    expected = [
        [
            oracle_row([1, 4 + number % 50, 2], "float32").tolist(),
            oracle_row([number % 10], "float32", NARROW).tolist(),
        ]
        for number in range(40)
    ]
    assert found == expected


@pytest.mark.parametrize("lost", ["worker", pytest.param("scheduler", marks=pytest.mark.slow)])
async def test_while_one_model_is_down_the_other_is_served(peers: Peers, lost: str) -> None:
    await asyncio.to_thread((peers.workers if lost == "worker" else peers.schedulers)["A"].close)
    answer = await until_ready(peers.port, 503)
    assert {name: one["status"] for name, one in answer.json["models"].items()} == {"A": "unavailable", "B": "ready"}
    assert answer.json["reason"].startswith("A: ")

    served = await embed(peers.port, {"input": [f"v{number}" for number in range(10)], "model": "B"})
    down = await embed(peers.port, {"input": "w1", "model": "A"}, {"X-Request-Timeout-Ms": "50"})

    rows = [row["embedding"] for row in served.json["data"]]
    assert rows == [oracle_row([number], "float32", NARROW).tolist() for number in range(10)]
    assert down.status in (503, 504)
