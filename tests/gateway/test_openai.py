"""/v1/embeddings: what a good request is answered with."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors

from common.errors import DeadlineExceeded, NonfiniteOutput, Overloaded, Unavailable
from common.metrics import Metrics
from common.wire.messages import ModelFacts
from common.wire.transport import now_ns
from gateway.parsing import is_served
from tests.gateway.conftest import DIMENSIONS, MAX_TOKENS, CountingThreads, Running, Serve, vector
from tests.gateway.wire import Answer, Wire, ask, embed, post, request_bytes
from tests.timing import assert_in_time

# The ids of "w5 w6" in the tiny tokenizer.
W5_W6 = [1, 9, 10, 2]


def embeddings(body: dict) -> list[list[float]]:
    return [item["embedding"] for item in body["data"]]


@pytest.mark.parametrize("inputs", ["w5 w6", ["w5 w6"], W5_W6, [W5_W6]], ids=str)
async def test_a_text_is_answered_in_the_form_that_openai_clients_read(server: Running, inputs: object) -> None:
    answer = await embed(server.port, {"input": inputs, "model": "tiny"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "object": "list",
        "model": "tiny",
        "data": [{"object": "embedding", "index": 0, "embedding": [pytest.approx(x) for x in vector(W5_W6).tolist()]}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


async def test_floats_are_the_shortest_decimals_that_give_float32_back(server: Running) -> None:
    answer = await embed(server.port, {"input": "w5 w6"})
    numbers = answer.body.partition(b'"embedding":[')[2].partition(b"]")[0].decode().split(",")
    assert np.array(numbers, dtype=np.float32).tobytes() == vector(W5_W6).tobytes()
    assert max(len(number.lstrip("-").lstrip("0.").replace("e-", "")) for number in numbers) <= 10


async def test_answers_keep_the_order_of_the_inputs(server: Running) -> None:
    texts = [f"w{index % 60} w{index // 60}" for index in range(300)]
    body = (await embed(server.port, {"input": texts})).json
    assert [item["index"] for item in body["data"]] == list(range(300))
    expected = [vector([1, index % 60 + 4, index // 60 + 4, 2]) for index in range(300)]
    np.testing.assert_allclose(embeddings(body), expected, rtol=1e-6)
    assert body["usage"] == {"prompt_tokens": 1200, "total_tokens": 1200}


async def test_base64_holds_little_endian_float32(server: Running) -> None:
    body = (await embed(server.port, {"input": ["w5 w6", "w7"], "encoding_format": "base64"})).json
    rows = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in embeddings(body)]
    np.testing.assert_array_equal(rows, [vector(W5_W6), vector([1, 11, 2])])


async def test_the_raw_matrix_is_served_to_whom_it_is_acceptable(server: Running) -> None:
    answer = await embed(server.port, {"input": ["w5 w6", "w7"]}, {"Accept": "application/octet-stream"})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-embedding-shape"] == f"2,{DIMENSIONS}"
    assert answer.headers["x-embedding-dtype"] == "float32"
    rows = np.frombuffer(answer.body, dtype="<f4").reshape(2, DIMENSIONS)
    np.testing.assert_array_equal(rows, [vector(W5_W6), vector([1, 11, 2])])


OCTETS = "application/octet-stream"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("Application/Octet-Stream", OCTETS),
        (f"application/json;q=0.5, {OCTETS}", OCTETS),
        (f"application/json; charset=utf-8; q=0.1,{OCTETS} ; q=0.2", OCTETS),
        (f"*/*;q=0.1, {OCTETS};q=0.9", OCTETS),
        (f"application/*;q=0, {OCTETS};q=0.001", OCTETS),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("text/html, */*;q=0.8", "application/json"),
        (f"{OCTETS};q=0", "application/json"),
        (f"{OCTETS};q=0.5, application/json", "application/json"),
        (f"application/json, {OCTETS};Q=0.1", "application/json"),
        (f"{OCTETS}, application/json", "application/json"),
        (f"{OCTETS};q=high", "application/json"),
        (f"{OCTETS}+zip", "application/json"),
        ("", "application/json"),
    ],
)
async def test_the_raw_matrix_is_for_whom_ranks_it_above_json(server: Running, accept: str, content_type: str) -> None:
    answer = await embed(server.port, {"input": "w5"}, {"Accept": accept})
    assert (answer.status, answer.headers["content-type"]) == (200, content_type)


@pytest.mark.parametrize(("inputs", "param"), [(["w1", "w2"], "input[1]"), ("w1", "input")])
async def test_what_is_not_finite_is_an_error_in_the_raw_matrix_too(
    server: Running, inputs: object, param: str
) -> None:
    server.stub.poison = float("nan")
    answer = await embed(server.port, {"input": inputs}, {"Accept": OCTETS})
    assert answer.refusal == (500, "nonfinite_output", param)


@pytest.mark.parametrize(("num_inputs", "num_renderings"), [(10, 0), pytest.param(5462, 1, marks=pytest.mark.slow)])
async def test_a_large_matrix_is_written_on_a_thread_as_large_json_is(
    serve: Serve, num_inputs: int, num_renderings: int
) -> None:
    running = await serve(max_inputs=6000)  # of 12 values each
    threads = running.gateway._threads
    threads.__class__ = CountingThreads
    body = {"input": [[5]] * num_inputs, "encoding_format": "base64"}
    json_answer = await embed(running.port, body, {"Accept": "application/json"})
    num_json_runs, threads.num_runs = threads.num_runs, 0
    matrix = await embed(running.port, body, {"Accept": OCTETS})
    assert (json_answer.status, matrix.status, len(matrix.body)) == (200, 200, num_inputs * DIMENSIONS * 4)
    assert threads.num_runs == num_json_runs == -(-num_inputs // 64) + num_renderings


async def test_a_large_answer_is_the_same_as_its_parts(serve: Serve, facts: ModelFacts) -> None:
    running = await serve()
    body = (await embed(running.port, {"input": [[index % 60 + 4, 5] for index in range(2048)]})).json
    small = (await embed(running.port, {"input": [[index + 4, 5] for index in range(60)]})).json
    assert embeddings(body)[60:120] == embeddings(small)
    assert len(embeddings(body)) == 2048


async def test_normalize_false_gives_the_vector_as_the_model_made_it(server: Running) -> None:
    row = embeddings((await embed(server.port, {"input": "w5 w6", "normalize": False})).json)[0]
    np.testing.assert_allclose(row, vector(W5_W6, normalize=False), rtol=1e-6)


@pytest.mark.parametrize(
    "extra",
    [
        {"encoding_format": None, "dimensions": None, "user": None, "stream": None, "prompt": None, "truncate": None},
        {"user": "u1"},
        {"user": "u" * 256},
        {"stream": False, "metadata": {"a": [1]}, "priority": 3, "timeout": 5},
        {"model": "tiny"},
        {"model": "some-org/tiny"},
        {"lane": "backfill"},
        {"encoding_format": "float"},
        {"dimensions": DIMENSIONS},
    ],
    ids=lambda extra: "-".join(extra),
)
async def test_what_clients_send_along_changes_no_vector(server: Running, extra: dict[str, object]) -> None:
    answer = await embed(server.port, {"input": "w5 w6", **extra})
    assert answer.status == 200, answer.body
    np.testing.assert_allclose(embeddings(answer.json), [vector(W5_W6)], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2", True),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2", True),
        ("bge-m3", "BAAI/bge-m3", True),
        ("BAAI/bge-m3", "BAAI/bge-m3", True),
        ("baai/bge-m3", "BAAI/bge-m3", False),
        ("BGE-M3", "BAAI/bge-m3", False),
        ("other/bge-m3", "BAAI/bge-m3", False),
        ("all-minilm-l6-v2", "all-MiniLM-L6-v2", False),
        ("a/b/all-MiniLM-L6-v2", "all-MiniLM-L6-v2", False),
        ("../all-MiniLM-L6-v2", "all-MiniLM-L6-v2", False),
        ("/all-MiniLM-L6-v2", "all-MiniLM-L6-v2", False),
        ("all-MiniLM-L6-v2/", "all-MiniLM-L6-v2", False),
        ("", "all-MiniLM-L6-v2", False),
    ],
)
def test_a_model_is_known_with_and_without_its_organisation(model: str, name: str, expected: bool) -> None:
    assert is_served(model, name) is expected


async def test_a_prompt_goes_before_every_text_and_counts_as_tokens(server: Running) -> None:
    expected = vector([1, 5, 6, 9, 2])
    for field in ({"prompt_name": "query"}, {"prompt": "w1 w2 "}):
        body = (await embed(server.port, {"input": ["w5"], **field})).json
        np.testing.assert_allclose(embeddings(body), [expected], rtol=1e-6)
        assert body["usage"]["prompt_tokens"] == 5


async def test_the_checkpoints_default_prompt_is_used_until_another_is_named(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, default_prompt_name="query"))
    default = (await embed(running.port, {"input": "w5"})).json
    named = (await embed(running.port, {"input": "w5", "prompt_name": "document"})).json
    empty = (await embed(running.port, {"input": "w5", "prompt": ""})).json
    ids = (await embed(running.port, {"input": [1, 9, 2]})).json
    assert [body["usage"]["prompt_tokens"] for body in (default, named, empty, ids)] == [5, 3, 3, 3]


async def test_a_prompt_that_is_not_pooled_leaves_a_span_of_what_follows_it(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, include_prompt=False))

    await embed(running.port, {"input": ["w5", "w5 w6"], "prompt_name": "query"})
    await embed(running.port, {"input": "w5"})
    await embed(running.port, {"input": [1, 9, 2]})

    assert [sent["spans"] for sent in running.stub.submitted] == [[[[3, 5]], [[3, 6]]], None, None]
    assert running.stub.submitted[0]["sequences"][0] == [1, 5, 6, 9, 2]


async def test_a_prompt_that_leaves_nothing_to_pool_is_refused(serve: Serve, facts: ModelFacts, tmp_path: Path) -> None:
    bare = RustTokenizer.from_file(f"{facts.folder}/tokenizer.json")
    bare.post_processor = processors.Sequence([])
    bare.save(str(tmp_path / "tokenizer.json"))
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    served = dataclasses.replace(facts, include_prompt=False, folder=str(tmp_path), tokenizer_sha256=digest)
    running = await serve(served=served)

    answer = await embed(running.port, {"input": "w5", "prompt": "w1 " * 20, "truncate": True})

    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "empty_input", "input")
    assert running.stub.submitted == []


async def test_a_prompt_that_is_not_pooled_cannot_be_cut_off(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=dataclasses.replace(facts, include_prompt=False))
    body = {"input": "w5", "prompt": "w1 ", "truncate": True, "truncation_direction": "left"}

    answer = await embed(running.port, body)

    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_parameter", "truncation_direction")


@pytest.mark.parametrize("shape", ["string", "list", "second", "ids"])
@pytest.mark.parametrize(("direction", "first_word"), [("right", 0), ("left", 26)])
async def test_truncation_keeps_the_special_tokens_in_every_shape(
    server: Running, shape: str, direction: str, first_word: int
) -> None:
    text = " ".join(f"w{index}" for index in range(40))
    inputs = {"string": text, "list": [text], "second": ["w1", text], "ids": list(range(4, 44))}
    answer = await embed(server.port, {"input": inputs[shape], "truncate": True, "truncation_direction": direction})
    assert answer.status == 200, answer.body
    kept = list(range(first_word + 4, first_word + 18))
    ids = {"right": list(range(4, 20)), "left": list(range(28, 44))}[direction]
    expected = ids if shape == "ids" else [1, *kept, 2]
    assert server.stub.submitted[-1]["sequences"][-1] == expected
    assert len(expected) == MAX_TOKENS


async def test_with_truncation_a_text_of_any_length_is_served(server: Running) -> None:
    answer = await embed(server.port, {"input": "w5 " * 100_000, "truncate": True})
    assert answer.status == 200
    assert server.stub.submitted[-1]["sequences"] == [[1, *[9] * 14, 2]]


async def test_auto_truncate_is_the_default_and_no_more(serve: Serve) -> None:
    running = await serve(auto_truncate=True)
    long = "w5 " * 40
    assert (await embed(running.port, {"input": long})).status == 200
    assert (await embed(running.port, {"input": long, "truncate": False})).status == 400


async def test_the_lane_and_the_deadline_reach_the_scheduler(server: Running) -> None:
    before = now_ns()
    await embed(server.port, {"input": "w1", "lane": "backfill"}, {"X-Request-Timeout-Ms": "1234"})
    await embed(server.port, {"input": "w1"})
    await embed(server.port, {"input": "w1"}, {"X-Request-Timeout-Ms": "999999999999"})
    first, second, third = server.stub.submitted
    assert (first["lane"], second["lane"]) == ("backfill", "online")
    assert [(call["deadline_ns"] - before) // 10**9 for call in (first, second, third)] == [1, 60, 600]


async def test_the_answer_says_where_its_time_went(server: Running) -> None:
    answer = await embed(server.port, {"input": "w1"}, {"X-Request-Id": "mine-1"})
    timing = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(timing) == ["parse", "tokenize", "queue", "step", "render", "total"]
    assert (timing["queue"], timing["step"]) == ("1.500", "2.500")
    assert float(timing["total"]) > float(timing["tokenize"]) > 0
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-model-fingerprint"] == "0123456789abcdef"


def milliseconds(answer: Answer) -> dict[str, float]:
    """What `Server-Timing` says of each stage."""
    parts = (part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    return {stage: float(duration) for stage, duration in parts}


async def test_a_stage_that_fails_shows_its_time_too(server: Running) -> None:
    parsed = milliseconds(await embed(server.port, {"input": ["w1"] * 2000 + [""]}))
    tokenized = milliseconds(await embed(server.port, {"input": ["w1", "w1 " * 60]}))
    server.stub.poison = float("nan")
    rendered = milliseconds(await embed(server.port, {"input": ["w1", "w2"]}))

    assert parsed["parse"] > 0 == parsed["tokenize"]
    assert tokenized["tokenize"] > 0 == tokenized["render"]
    assert rendered["render"] > 0


async def test_a_deadline_that_passes_while_the_input_is_tokenized_shows_there(serve: Serve) -> None:
    running = await serve(tokenizer_threads=1)
    release = threading.Event()
    blocking = running.gateway._threads.run(lambda: release.wait(10))
    answer = await embed(running.port, {"input": ["w1", "w2"]}, {"X-Request-Timeout-Ms": "100"})
    release.set()
    await blocking
    timing = milliseconds(answer)
    assert answer.status == 504
    assert 50 < timing["tokenize"] <= timing["total"]


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (Overloaded("full", retry_after_s=0.25), 429, "overloaded", {"retry-after": "1", "retry-after-ms": "250"}),
        (Overloaded("full", retry_after_s=2.1), 429, "overloaded", {"retry-after": "3", "retry-after-ms": "2100"}),
        (Unavailable("none"), 503, "no_capacity", {"retry-after": "1", "retry-after-ms": "1000"}),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", {}),
        (NonfiniteOutput("nan", sequence=0), 500, "nonfinite_output", {"x-should-retry": "false"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_the_scheduler_refuses_is_told_with_when_to_come_back(
    server: Running, error: Exception, status: int, code: str, headers: dict[str, str]
) -> None:
    server.stub.error = error
    answer = await embed(server.port, {"input": ["w1"]})
    assert (answer.status, answer.error["code"]) == (status, code)
    told = {"retry-after", "retry-after-ms", "x-should-retry"}
    assert {name: value for name, value in answer.headers.items() if name in told} == headers
    assert "server-timing" in answer.headers


async def test_requests_that_are_tokenized_together_each_get_their_own_answer(server: Running) -> None:
    def fields(index: int) -> dict[str, object]:
        if index % 10 == 3:
            return {"input": ["w1", "w1 " * MAX_TOKENS]}
        texts = [f"w{index % 60} w5", "w2"]
        return {"input": texts, "truncate": index % 3 == 0, "prompt": "w1 " if index % 4 == 0 else None}

    answers = await asyncio.gather(*(embed(server.port, fields(index)) for index in range(100)))
    for index, answer in enumerate(answers):
        if index % 10 == 3:
            assert answer.error["param"] == "input[1]"
        else:
            prompt = [5] if index % 4 == 0 else []
            expected = [vector([1, *prompt, index % 60 + 4, 9, 2]), vector([1, *prompt, 6, 2])]
            np.testing.assert_allclose(embeddings(answer.json), expected, rtol=1e-6)


async def test_a_query_waits_for_no_longer_text_to_be_tokenized(serve: Serve) -> None:
    running = await serve(tokenizer_threads=1)
    release = threading.Event()
    blocking = running.gateway._threads.run(lambda: release.wait(10))
    answer = await embed(running.port, {"input": "w5 w6"})
    release.set()
    await blocking
    assert (answer.status, answer.json["usage"]["total_tokens"]) == (200, 4)


async def test_a_client_that_leaves_cancels_its_work(server: Running, metrics: Metrics) -> None:
    before = metrics.clients_gone._value.get()
    server.stub.gate.clear()
    wire = await Wire.connect(server.port)
    await wire.send(request_bytes("POST", "/v1/embeddings", b'{"input":"w1"}'))
    await server.stub.entered.wait()
    await wire.close()
    await server.stub.cancelled.wait()
    assert metrics.clients_gone._value.get() == before + 1
    server.stub.gate.set()
    assert (await embed(server.port, {"input": "w1"})).status == 200


async def test_a_request_that_comes_while_the_model_loads_waits_for_it(serve: Serve, facts: ModelFacts) -> None:
    running = await serve(served=None)
    waiting = asyncio.create_task(embed(running.port, {"input": "w1"}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    running.stub.on_facts(facts)
    assert (await waiting).status == 200


@pytest.mark.slow
async def test_a_deadline_is_kept_while_the_input_is_tokenized(serve: Serve) -> None:
    running = await serve(max_inputs=100_000, max_request_tokens=10_000_000)
    body = json.dumps({"input": ["w1 " * 14] * 100_000}).encode()
    began = time.monotonic()
    answer = await ask(running.port, "POST", "/v1/embeddings", body, {"X-Request-Timeout-Ms": "300"})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    taken_s = time.monotonic() - began
    assert running.stub.submitted == []
    assert_in_time(taken_s, 1.5)  # the whole takes several seconds


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_sha256": "0" * 64},  # of a file that was changed
        {"separator_id": 5},  # is no special token
        {"tasks": ["score"], "num_labels": 1, "pair_template": "qwen3-reranker"},  # which the tokenizer does not fit
    ],
    ids=lambda change: "-".join(change),
)
async def test_a_model_whose_tokenizer_does_not_fit_is_not_served(
    serve: Serve, facts: ModelFacts, change: dict[str, object]
) -> None:
    running = await serve(served=dataclasses.replace(facts, **change))
    for path, fields in (
        ("/v1/embeddings", {"input": "w1"}),
        ("/rerank", {"query": "w1", "documents": ["w1"]}),
        ("/v1/contextualizedembeddings", {"input": [["w1"]]}),
    ):
        answer = await post(running.port, path, fields)
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
    ready = await ask(running.port, "GET", "/ready")
    assert (ready.status, ready.json["status"]) == (503, "unavailable")
    assert facts.folder not in ready.body.decode()


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"input": "w5 w6", "input_type": "query"}, [1, 5, 6, 9, 10, 2]),
        ({"input": "w5 w6", "input_type": "document"}, W5_W6),
        ({"input": "w5 w6", "input_type": None}, W5_W6),
        ({"input": "w1 " * 20, "truncation": True}, [1, *[5] * 14, 2]),
        ({"input": "w1 " * 20, "truncation": True, "truncate": None}, [1, *[5] * 14, 2]),
        ({"input": "w5 w6", "output_dtype": "float", "encoding_format": "float"}, W5_W6),
    ],
)
async def test_voyages_fields_say_what_goes_before_a_text_and_whether_it_is_cut(
    server: Running, fields: dict[str, object], ids: list[int]
) -> None:
    answer = await embed(server.port, fields)
    assert answer.status == 200, answer.body
    assert server.stub.submitted[0]["sequences"] == [ids]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"dimensions": 3, "output_dimension": 3}, "invalid_value", "output_dimension"),
        ({"output_dimension": DIMENSIONS + 1}, "out_of_range", "output_dimension"),
        ({"truncate": False, "truncation": True}, "invalid_value", "truncation"),
        ({"input": "w1 " * 20, "truncation": False}, "context_length_exceeded", "input"),
        ({"input_type": "query", "prompt": "w1"}, "invalid_value", "prompt"),
        ({"output_dtype": "int8"}, "unsupported_parameter", "output_dtype"),
        ({"output_dtype": "float16"}, "invalid_value", "output_dtype"),
        ({"output_dtype": "float", "encoding_format": "base64_int8"}, "invalid_value", "encoding_format"),
    ],
    ids=repr,
)
async def test_voyages_fields_contradict_nothing(
    server: Running, fields: dict[str, object], code: str, param: str
) -> None:
    answer = await embed(server.port, {"input": "w5 w6", **fields})
    assert answer.refusal == (400, code, param)
    assert server.stub.submitted == []
