"""Health, readiness, models, info, metrics."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from common.metrics import Metrics
from common.wire.messages import ModelFacts
from gateway import openapi
from gateway.routes import operations
from gateway.status import Readiness
from tests.gateway.conftest import DIMENSIONS, Running, Serve
from tests.gateway.wire import ask, embed


async def test_health_is_alive_without_a_model(serve: Serve) -> None:
    running = await serve(served=None)
    answer = await ask(running.port, "GET", "/health")
    assert (answer.status, answer.json) == (200, {"status": "alive"})
    assert {"x-request-id", "server-timing"} <= answer.headers.keys()


async def test_ready_tells_workers_and_model(server: Running) -> None:
    answer = await ask(server.port, "GET", "/ready")
    assert answer.status == 200
    assert answer.json == {"status": "ready", "workers": {"ready": 1, "total": 1}, "model": "tiny"}


@pytest.mark.parametrize("status", ["starting", "draining", "unavailable"])
async def test_not_ready_is_503_with_the_reason(server: Running, status: str) -> None:
    server.stub.status = Readiness(status, 0, 2, "No worker is ready.")
    answer = await ask(server.port, "GET", "/ready")
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    expected = {"status": status, "workers": {"ready": 0, "total": 2}, "model": "tiny", "reason": "No worker is ready."}
    assert answer.json == expected


async def test_a_worker_without_a_tokenizer_is_not_ready(serve: Serve) -> None:
    running = await serve(served=None)
    answer = await ask(running.port, "GET", "/ready")
    assert (answer.status, answer.json["status"], answer.json["model"]) == (503, "starting", None)


async def test_the_model_is_listed(server: Running) -> None:
    answer = await ask(server.port, "GET", "/v1/models")
    [model] = answer.json["data"]
    assert answer.json["object"] == "list"
    assert model == {"id": "tiny", "object": "model", "created": model["created"], "owned_by": "hedgerow"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/tiny", 200),
        ("/v1/models/tiny/", 200),
        ("/v1/models/some-org/tiny", 200),
        ("/v1/models/some-org%2Ftiny", 200),
        ("/v1/models/Tiny", 404),
        ("/v1/models/..%2ftiny", 404),
        ("/v1/models/", 200),
    ],
)
async def test_a_model_is_found_under_its_names(server: Running, path: str, status: int) -> None:
    answer = await ask(server.port, "GET", path)
    assert answer.status == status
    if status == 404:
        assert answer.error["code"] == "model_not_found"


async def test_info_tells_the_models_facts_but_not_its_place(server: Running, facts: ModelFacts) -> None:
    answer = await ask(server.port, "GET", "/info")
    assert answer.json["model"]["dimensions"] == DIMENSIONS
    assert answer.json["model"]["prompts"] == ["document", "query"]
    assert str(Path(facts.folder).parent) not in answer.body.decode()


async def test_info_tells_how_a_model_scores_and_the_limits_that_hold_here(serve: Serve, facts: ModelFacts) -> None:
    scoring = {"num_labels": 1, "score_activation": "sigmoid", "pair_template": "pair", "include_prompt": False}
    running = await serve(served=dataclasses.replace(facts, **scoring), max_inputs=7, max_request_tokens=5000)
    answer = await ask(running.port, "GET", "/info")
    assert {name: answer.json["model"][name] for name in scoring} == scoring
    assert answer.json["limits"]["max_rerank_documents"] == 7
    assert answer.json["limits"]["max_contextual_tokens"] == 5000


async def test_metrics_count_by_pattern_and_never_by_what_clients_send(server: Running, metrics: Metrics) -> None:
    for index in range(30):
        await ask(server.port, "GET", f"/made-up-{index}")
        await ask(server.port, "GET", f"/v1/models/made-up-{index}")
        await embed(server.port, {"input": "w1", "model": f"made-up-{index}", "user": f"u{index}"})
    await embed(server.port, {"input": ["w1", "w2"]})
    labels = {
        (sample.labels["route"], sample.labels["status"])
        for metric in metrics.requests.collect()
        for sample in metric.samples
    }
    assert {("unknown", "404"), ("/v1/models/{id}", "404"), ("/v1/embeddings", "404")} <= labels
    assert not [route for route, _ in labels if "made-up" in route]


async def test_metrics_are_the_prometheus_text(server: Running) -> None:
    answer = await ask(server.port, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_a_server_whose_package_is_not_installed_serves_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(operations, "version", not_installed)
    running = await serve()
    document = (await ask(running.port, "GET", "/openapi.json")).json
    info = (await ask(running.port, "GET", "/info")).json
    assert (document["info"]["version"], info["version"], info["versions"]["hedgerow"]) == ("unknown", "unknown", None)
    assert json.loads(openapi.document("1.2.3"))["info"]["version"] == "1.2.3"


async def test_head_is_answered_without_a_body(server: Running) -> None:
    answer = await ask(server.port, "HEAD", "/info", headers={"Connection": "close"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
