"""What other servers got wrong on these routes: short vectors that are no longer of unit length, a long text that
stops everything beside it; a failure that leaves no trace, one input that takes others along."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from common.errors import InternalError, Overloaded
from common.model_location import find_model
from common.wire.messages import ModelFacts
from tests.gateway.conftest import DIMENSIONS, Running, Serve, vector, with_tokenizer
from tests.gateway.wire import ask, embed
from tests.timing import assert_in_time

W5_W6 = [1, 9, 10, 2]


@pytest.mark.parametrize("name", ["dimensions", "output_dimension"])
@pytest.mark.parametrize("dimensions", [1, 3, DIMENSIONS])
async def test_fewer_dimensions_are_of_unit_length_in_both_formats(server: Running, dimensions: int, name: str) -> None:
    body = {"input": "w5 w6", name: dimensions}

    floats = (await embed(server.port, body)).json["data"][0]["embedding"]
    encoded = (await embed(server.port, body | {"encoding_format": "base64"})).json["data"][0]["embedding"]

    row = np.frombuffer(base64.b64decode(encoded), dtype="<f4")
    whole = vector(W5_W6, normalize=False)
    np.testing.assert_allclose(row, whole[:dimensions] / np.linalg.norm(whole[:dimensions]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(row, floats, rtol=0, atol=1e-7)
    assert np.linalg.norm(row) == pytest.approx(1, abs=1e-5)


async def test_what_is_this_servers_fault_is_in_its_log_with_its_cause_under_the_requests_id(
    serve: Serve, facts: ModelFacts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_unknown = Tokenizer(models.WordLevel({"w1": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    running = await serve(served=with_tokenizer(facts, without_unknown, tmp_path))
    failed = await embed(running.port, {"input": "sesame"}, {"X-Request-Id": "mine-7"})
    running.stub.error = InternalError("A worker failed.")
    told = await embed(running.port, {"input": "w1"}, {"X-Request-Id": "mine-8"})
    running.stub.error = Overloaded("full")
    refused = await embed(running.port, {"input": "w1"}, {"X-Request-Id": "mine-9"})

    assert (failed.status, told.status, refused.status) == (500, 500, 429)
    logged = [record for record in caplog.records if record.name == "gateway.app" and record.levelname == "ERROR"]
    assert [record.getMessage() for record in logged] == [
        "request mine-7 failed: The tokenizer failed on this input.",
        "request mine-8 failed: A worker failed.",
    ]
    assert "WordLevel error" in str(logged[0].exc_info)
    assert not logged[1].exc_info


@pytest.fixture
def minilm(facts: ModelFacts) -> ModelFacts:
    """A model with the real tokenizer of all-MiniLM-L6-v2."""
    folder = find_model("all-MiniLM-L6-v2").path
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    changes = {"folder": str(folder), "tokenizer_sha256": digest, "max_tokens": 256, "vocab_size": 30_522}
    return dataclasses.replace(facts, **changes)


@pytest.mark.slow
async def test_texts_of_megabytes_hold_up_neither_health_nor_short_texts(serve: Serve, minilm: ModelFacts) -> None:
    running = await serve(served=minilm)
    long = ["which words are there? " * 220_000, "a" * 1_000_000, "字" * 1_000_000]  # 5 MB, 1 MB, 3 MB
    done = asyncio.Event()

    async def repeat(path: str) -> list[float]:
        seconds = []
        while not done.is_set():
            began_s = time.perf_counter()
            if path == "/health":
                assert (await ask(running.port, "GET", path)).status == 200
            else:
                assert (await embed(running.port, {"input": "word"})).status == 200
            seconds.append(time.perf_counter() - began_s)
            await asyncio.sleep(0.02)
        return seconds

    beside = [asyncio.create_task(repeat(path)) for path in ("/health", "/v1/embeddings")]
    began_s = time.perf_counter()
    answers = [await embed(running.port, {"input": [text, "word"], "truncate": True}) for text in long * 2]
    long_s = time.perf_counter() - began_s
    refused = await embed(running.port, {"input": ["word", long[0]]})
    done.set()
    health_s, short_s = await asyncio.gather(*beside)

    assert [answer.status for answer in answers] == [200] * 6
    sent = [row["sequences"] for row in running.stub.submitted if len(row["sequences"]) == 2]
    assert [len(sequences[0]) for sequences in sent[:3]] == [256, 3, 256]  # a word of a million letters is unknown
    assert refused.refusal == (400, "input_too_long", "input[1]")
    assert_in_time(long_s, 10)
    assert_in_time(float(np.percentile(health_s, 99)), 0.2)
    assert_in_time(max(short_s), 2.0)


@pytest.mark.thorough
@pytest.mark.slow
async def test_health_answers_at_once_while_every_tokenizer_thread_is_busy(serve: Serve, minilm: ModelFacts) -> None:
    running = await serve(served=minilm, tokenizer_threads=2)
    text = ("which words are there? " * 400)[: 32 * 256]  # as long as a text may be
    body = {"input": [text] * 64, "truncate": True}
    done = asyncio.Event()

    async def saturate() -> int:
        num_answered = 0
        while not done.is_set():
            assert (await embed(running.port, body)).status == 200
            num_answered += 1
        return num_answered

    beside = [asyncio.create_task(saturate()) for _ in range(6)]
    times_s = []
    for _ in range(150):
        began_s = time.perf_counter()
        answer = await ask(running.port, "GET", "/health")
        times_s.append(time.perf_counter() - began_s)
        assert answer.status == 200
        await asyncio.sleep(0.02)
    done.set()
    assert sum(await asyncio.gather(*beside)) >= 12  # they were at it all the while
    assert_in_time(float(np.percentile(times_s, 99)), 0.5)
