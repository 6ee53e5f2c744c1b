"""Keys: who is let in, in which lane, for how many tokens; the file that they come from."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import NonfiniteOutput, Overloaded
from common.metrics import Metrics
from common.wire.messages import ModelFacts
from gateway.client import Embedded, Options
from gateway.edge import auth
from gateway.edge.auth import Key, KeyCheck, KeysRefused, known_keys
from tests.gateway.conftest import Running, Serve, Stub
from tests.gateway.wire import answer_to, ask, embed, post

BEARER = {"Authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": f"{scheme}sesame"} for scheme in ("Bearer ", "bearer ", "BEARER ", "Bearer  ")]
    + [{"x-api-key": "sesame"}],
    ids=str,
)
async def test_the_right_key_is_let_in(serve: Serve, headers: dict[str, str]) -> None:
    running = await serve(api_key="sesame")
    assert (await embed(running.port, {"input": "w1"}, headers)).status == 200


# Case HTTP-02, beside rows 51 and 55 of bad_input.toml.
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Authorization: Bearer sesame\r\n", 200),
        (b"Authorization: Bearer sesam\r\n", 401),
        (b"x-api-key: x\r\nx-api-key: sesame\r\n", 401),
        (b"x-api-key: " + hashlib.sha256(b"sesame").hexdigest().encode() + b"\r\n", 401),
    ],
    ids=["right", "a byte too few", "two headers, the second right", "its digest"],
)
async def test_no_key_is_logged_or_repeated(
    serve: Serve, caplog: pytest.LogCaptureFixture, headers: bytes, status: int
) -> None:
    caplog.set_level("DEBUG")
    running = await serve(api_key="sesame")
    answer = await answer_to(running.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
    assert answer.status == status
    assert status == 200 or answer.error["code"] == "invalid_api_key"
    assert b"sesam" not in answer.body
    assert "sesam" not in caplog.text


@pytest.mark.parametrize(
    "target", ["/v1/embeddings", "/rerank", "/score", "/info", "/made-up", "//v1/embeddings", "/Health"]
)
async def test_everything_needs_the_key(serve: Serve, target: str) -> None:
    running = await serve(api_key="sesame")
    for method in ("GET", "POST", "HEAD", "PUT"):
        answer = await ask(running.port, method, target, headers={"Connection": "close"})
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    ("target", "status"),
    [("/health", 200), ("/ready", 200), ("/metrics", 200), ("/", 200), ("/health/", 200), ("/v1/models/", 401)],
)
async def test_what_is_open_with_a_key_set(serve: Serve, target: str, status: int) -> None:
    running = await serve(api_key="sesame")
    assert (await ask(running.port, "GET", target)).status == status


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "x-forwarded-host", "X-Forwarded-Proto", "Forwarded", "Via", "X-Real-IP"]
)
async def test_metrics_need_the_key_through_a_proxy(serve: Serve, header: str) -> None:
    running = await serve(api_key="sesame")
    assert (await ask(running.port, "GET", "/metrics", headers={header: "192.0.2.1"})).status == 401
    assert (await ask(running.port, "GET", "/metrics", headers={header: "192.0.2.1", **BEARER})).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LocalHost:8080"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"}, 200),
        ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8081"}, 401),
        ({"Host": "localhost:8080", "Origin": "http://127.0.0.1:8080"}, 401),
        ({"Host": "localhost", "Origin": "null"}, 401),
        ({"Host": "localhost", "Origin": "https://app.example.org"}, 401),
        ({"Host": "rebound.example.org"}, 401),
        ({"Host": "rebound.example.org", "Origin": "http://rebound.example.org"}, 401),
        ({"Host": "localhost.example.org"}, 401),
        ({"Host": "127.0.0.1.example.org:8080"}, 401),
        ({"Host": "127.0.0.2"}, 401),
        ({"Host": "localhost:"}, 401),
    ],
)
async def test_what_is_open_to_this_host_is_so_by_its_own_names_and_to_no_other_page(
    serve: Serve, headers: dict[str, str], status: int
) -> None:
    running = await serve(api_key="sesame", cors_origins="*")
    for target in ("/metrics", "/"):
        assert (await ask(running.port, "GET", target, headers=headers)).status == status


@pytest.mark.parametrize(("more", "status"), [(b"", 200), (b"Origin: http://localhost\r\n", 401)])
async def test_http_1_0_need_not_name_the_host(serve: Serve, more: bytes, status: int) -> None:
    running = await serve(api_key="sesame")
    assert (await answer_to(running.port, b"GET /metrics HTTP/1.0\r\n" + more + b"\r\n")).status == status


@pytest.mark.parametrize("target", ["/docs", "/openapi.json"])
async def test_the_pages_for_this_host_need_the_key_from_elsewhere(serve: Serve, target: str) -> None:
    running = await serve(api_key="sesame")
    assert (await ask(running.port, "GET", target, headers={"X-Forwarded-For": "192.0.2.1"})).status == 401
    assert (await ask(running.port, "GET", target)).status != 401


# --- several keys ---


async def test_each_of_several_keys_is_let_in_and_no_other(serve: Serve) -> None:
    running = await serve(keys=KeyCheck([Key.of(f"key-{index}") for index in range(20)]))
    for index in (0, 7, 19):
        assert (await embed(running.port, {"input": "w1"}, {"x-api-key": f"key-{index}"})).status == 200
    assert (await embed(running.port, {"input": "w1"}, {"x-api-key": "key-20"})).status == 401


async def test_a_key_is_compared_with_all_keys_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    keys = [Key.of(text) for text in ("first", "second", "third")]
    assert KeyCheck(keys)._find(keys[0].digest) is keys[0]
    assert compared == [key.digest for key in keys]


async def test_replaced_keys_hold_from_the_next_request_on(serve: Serve) -> None:
    keys = KeyCheck([Key.of("old")])
    running = await serve(keys=keys)
    running.stub.gate.clear()
    begun = asyncio.ensure_future(embed(running.port, {"input": "w1"}, {"x-api-key": "old"}))
    await running.stub.entered.wait()
    keys.replace([Key.of("new")])
    running.stub.gate.set()
    assert (await begun).status == 200
    assert (await embed(running.port, {"input": "w1"}, {"x-api-key": "old"})).status == 401
    assert (await embed(running.port, {"input": "w1"}, {"x-api-key": "new"})).status == 200


# --- lanes ---


@pytest.mark.parametrize(
    ("held_to", "asked", "run_in"),
    [
        ("online", None, "online"),
        ("online", "online", "online"),
        ("online", "backfill", "backfill"),
        ("backfill", None, "backfill"),
        ("backfill", "backfill", "backfill"),
    ],
)
async def test_a_keys_lane_holds_where_a_request_names_none(
    serve: Serve, held_to: str, asked: str | None, run_in: str
) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", lane=held_to)]))
    assert (await embed(running.port, {"input": "w1", "lane": asked}, BEARER)).status == 200
    assert running.stub.submitted[0]["lane"] == run_in


async def test_what_a_key_may_not_run_online_is_not_tokenized(serve: Serve) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", lane="backfill")]))
    too_long = await embed(running.port, {"input": "w1 " * 60, "lane": "online"}, BEARER)
    assert too_long.refusal == (403, "forbidden", "lane")


# --- budgets ---


async def test_row_67_a_key_over_its_share_is_told_when_to_try_again(serve: Serve) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", tokens_per_minute=4), Key.of("other")]))
    first = await embed(running.port, {"input": "w1"}, BEARER)
    second = await embed(running.port, {"input": "w1"}, BEARER)
    assert (first.status, second.status) == (200, 429)
    assert (second.error["type"], second.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    # Of 4 tokens a minute 3 are gone; 2 more take 30 s to flow back.
    assert second.headers["retry-after"] == "30"
    assert 25_000 < int(second.headers["retry-after-ms"]) <= 30_000
    assert len(running.stub.submitted) == 1
    assert (await embed(running.port, {"input": "w1"}, {"x-api-key": "other"})).status == 200


async def test_two_gateways_of_a_suite_share_a_keys_budget(serve: Serve) -> None:
    first = await serve(keys=KeyCheck([Key.of("sesame", tokens_per_minute=4)]))
    second = await serve(keys=KeyCheck([Key.of("sesame", tokens_per_minute=4)]))
    assert (await embed(first.port, {"input": "w1"}, BEARER)).status == 200
    assert (await embed(second.port, {"input": "w1"}, BEARER)).status == 429


async def test_what_is_refused_before_it_runs_costs_no_tokens(serve: Serve) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", lane="backfill", tokens_per_minute=4)]))
    assert (await embed(running.port, {"input": "w1", "lane": "online"}, BEARER)).status == 403
    assert (await embed(running.port, {"input": "w1", "dimension": 3}, BEARER)).status == 400
    assert (await embed(running.port, {"input": "w1"}, BEARER)).status == 200


async def test_a_key_without_a_token_left_is_told_so_before_anything_is_tokenized(serve: Serve) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", tokens_per_minute=3)]))
    assert (await embed(running.port, {"input": "w1"}, BEARER)).status == 200
    too_long = await embed(running.port, {"input": ["w1 " * 60] * 100}, BEARER)
    assert (too_long.status, too_long.error["code"]) == (429, "rate_limit_exceeded")
    assert too_long.headers["retry-after"] == "20"
    assert "tokenize;dur=0.000" in too_long.headers["server-timing"]
    assert (await embed(running.port, {"input": ""}, BEARER)).status == 400


# --- a full queue ---


async def test_row_68_who_has_filled_the_queue_is_told_so_before_anything_is_tokenized_and_others_are_let_in(
    serve: Serve,
) -> None:
    keys = [Key.of("sesame"), Key.of("other")]
    running = await serve(keys=KeyCheck(keys))
    running.stub.full["online", keys[0].tenant] = Overloaded.queue_full(12_000)
    refused = await embed(running.port, {"input": ["w1 " * 60] * 100}, BEARER)
    assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "rate_limit_error", "overloaded")
    assert refused.error["message"] == (
        "The queue is full: 12.0 s of work wait. Try again later, or send less at once."
    )
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("12", "12000")
    assert "tokenize;dur=0.000" in refused.headers["server-timing"]
    assert running.stub.submitted == []
    assert (await embed(running.port, {"input": "w1", "lane": "backfill"}, BEARER)).status == 200
    assert (await embed(running.port, {"input": "w1"}, {"x-api-key": "other"})).status == 200
    assert [sent["tenant"] for sent in running.stub.submitted] == [key.tenant for key in keys]


async def test_without_keys_all_are_one_tenant(server: Running) -> None:
    assert (await embed(server.port, {"input": "w1"})).status == 200
    assert [sent["tenant"] for sent in server.stub.submitted] == [0]


class Quantising(Stub):
    """Makes rows of every encoding, each of ones; fails on a sequence with the id 13, which is w9."""

    async def submit(self, sequences: list[npt.NDArray[np.int32]], options: Options, **rest: object) -> Embedded:
        self.submitted.append({"encoding": options.encoding, "number": len(sequences)})
        for index, sequence in enumerate(sequences):
            if 13 in sequence.tolist():
                raise NonfiniteOutput("The model made a NaN of this input.", sequence=index)
        dtypes = {"float32": np.float32, "int8": np.int8, "binary": np.uint8}
        return Embedded(np.ones((len(sequences), 2), dtypes[options.encoding]), queue_us=1, step_us=1)


async def serve_quantising(serve: Serve, facts: ModelFacts, tokens_per_minute: int) -> Running:
    served = dataclasses.replace(facts, dimensions=16, normalize=False, encodings=["float32", "int8", "binary"])
    key = Key.of("sesame", name="quantising", tokens_per_minute=tokens_per_minute)
    running = await serve(served=served, keys=KeyCheck([key]))
    running.stub.__class__ = Quantising
    return running


async def test_a_request_of_several_encodings_is_charged_for_each_and_as_a_whole(
    serve: Serve, facts: ModelFacts, metrics: Metrics
) -> None:
    running = await serve_quantising(serve, facts, tokens_per_minute=10)
    fields = {"texts": ["w1 w2"], "embedding_types": ["float", "int8", "ubinary", "base64"]}
    before = _counted(metrics).get("quantising", 0)

    first = await post(running.port, "/v2/embed", fields, BEARER)
    second = await post(running.port, "/v2/embed", fields, BEARER)

    # 4 tokens in three encodings are more than a minute's worth, for which a full bucket is room enough.
    assert first.status == 200
    assert first.json["meta"]["billed_units"] == {"input_tokens": 4}
    assert [sent["encoding"] for sent in running.stub.submitted] == ["float32", "int8", "binary"]
    assert (second.status, second.headers["retry-after"]) == (429, "18")  # of 2 tokens that are owed, and of one more
    assert _counted(metrics)["quantising"] - before == 4


async def test_what_a_partial_request_runs_again_costs_its_key_nothing(
    serve: Serve, facts: ModelFacts, metrics: Metrics
) -> None:
    running = await serve_quantising(serve, facts, tokens_per_minute=20)
    before = _counted(metrics).get("quantising", 0)

    answer = await embed(running.port, {"input": ["w1", "w9", "w9", "w2", ""], "partial": True}, BEARER)

    assert answer.status == 200
    assert [item["index"] for item in answer.json["errors"]] == [1, 2, 4]
    assert [sent["number"] for sent in running.stub.submitted] == [4, 3, 2]  # 12, 9 and 6 tokens
    assert _counted(metrics)["quantising"] - before == answer.json["usage"]["total_tokens"] == 6
    assert (await embed(running.port, {"input": "w1 w2 w3 w4 w5 w6"}, BEARER)).status == 200  # the 8 that are left


async def test_an_answer_that_fails_is_not_counted_to_its_key(serve: Serve, metrics: Metrics) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", name="failing")]))
    running.stub.poison = float("nan")
    assert (await embed(running.port, {"input": "w1"}, BEARER)).status == 500
    assert "failing" not in _counted(metrics)


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"inputs": "w1"}), ("/decode", {"ids": [5]})])
async def test_what_runs_no_model_costs_no_tokens_and_yet_names_no_lane_that_its_key_may_not(
    serve: Serve, path: str, fields: dict[str, object]
) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", lane="backfill", tokens_per_minute=3)]))
    assert (await embed(running.port, {"input": "w1"}, BEARER)).status == 200
    for lane, status in ((None, 200), ("backfill", 200), ("online", 403)):
        answer = await post(running.port, path, fields | {"lane": lane}, BEARER)
        assert answer.status == status
    assert (await embed(running.port, {"input": "w1"}, BEARER)).status == 429


async def test_tokens_are_counted_by_the_names_of_keys_alone(serve: Serve, metrics: Metrics) -> None:
    running = await serve(keys=KeyCheck([Key.of("sesame", name="counted-here"), Key.of("nameless")]))
    before = _counted(metrics)
    await embed(running.port, {"input": ["w1", "w2 w3"]}, BEARER)
    await embed(running.port, {"input": "w1"}, {"x-api-key": "nameless"})
    assert _counted(metrics) == before | {"counted-here": 7.0}


def _counted(metrics: Metrics) -> dict[str, float]:
    samples = [sample for metric in metrics.key_tokens.collect() for sample in metric.samples]
    return {sample.labels["key"]: sample.value for sample in samples if sample.name.endswith("_total")}


# --- the file ---


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a file of keys; its path."""

    def write(text: str | bytes, mode: int = 0o600) -> str:
        path = tmp_path / "keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return str(path)

    return write


def test_a_file_holds_a_key_a_line_with_options_and_comments(write: Callable[..., str]) -> None:
    path = write(
        "# our keys\n\n"
        "key-one\n"
        "key-two==  name=team-a lane=backfill\ttokens_per_minute=250000   # until spring\r\n"
        "  key#three lane=online"
    )
    assert known_keys(path, "key-four") == (
        Key.of("key-one"),
        Key.of("key-two==", name="team-a", lane="backfill", tokens_per_minute=250_000),
        Key.of("key#three"),
        Key.of("key-four"),
    )


def test_the_lone_key_of_a_variable_is_one_more_unless_the_file_has_it(write: Callable[..., str]) -> None:
    assert known_keys("", None) == ()
    assert known_keys("", "canary") == (Key.of("canary"),)
    path = write("canary name=team-a\n")
    assert known_keys(path, "canary") == (Key.of("canary", name="team-a"),)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o610, 0o602])
def test_a_file_that_is_open_to_others_is_refused(write: Callable[..., str], mode: int) -> None:
    with pytest.raises(KeysRefused, match=rf"mode {mode:04o}.*chmod 600"):
        known_keys(write("canary\n", mode), None)


def test_a_file_that_only_its_owner_may_read_is_taken(write: Callable[..., str]) -> None:
    assert known_keys(write("canary\n", 0o400), None) == (Key.of("canary"),)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("canary name=", "name= needs"),
        ("canary name=a/b", "name= needs"),
        ("canary name=" + "n" * 65, "name= needs"),
        ("canary lane=fast", "lane= needs"),
        ("canary tokens_per_minute=0", "tokens_per_minute= needs"),
        ("canary tokens_per_minute=-1", "tokens_per_minute= needs"),
        ("canary tokens_per_minute=1e6", "tokens_per_minute= needs"),
        ("canary tokens_per_minute=" + "9" * 5000, "tokens_per_minute= needs"),
        ("canary tokens_per_minute=\u0661", "tokens_per_minute= needs"),
        ("canary canary-too", "only these are known"),
        ("canary rate=5", "only these are known"),
        ("canary lane=online lane=online", "comes twice"),
        ("name=canary", "the key itself comes first"),
        ("canar\u00ff", "printable ASCII"),
        ("canary\x00", "printable ASCII"),
        ("\ufeffcanary", "printable ASCII"),
        ("sesame", "also on line 1"),
        ("canary name=first", "also on line 1"),
    ],
)
def test_a_line_that_is_not_understood_is_named_and_not_quoted(
    write: Callable[..., str], line: str, problem: str
) -> None:
    with pytest.raises(KeysRefused, match=problem) as refused:
        known_keys(write(f"sesame name=first\n# more\n{line}\n"), None)
    assert "line 3" in str(refused.value)
    assert "canar" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "# no key yet\n\n"])
def test_a_file_without_a_key_is_refused_and_does_not_open_the_server(write: Callable[..., str], text: str) -> None:
    with pytest.raises(KeysRefused, match="holds no key"):
        known_keys(write(text), "canary")


def test_a_file_that_is_none_or_too_large_is_refused(write: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(KeysRefused, match="cannot be read: No such file"):
        known_keys(str(tmp_path / "absent"), None)
    with pytest.raises(KeysRefused, match="not a regular file"):
        known_keys("/dev/null", None)
    with pytest.raises(KeysRefused, match="holds 1001 keys"):
        known_keys(write("".join(f"key-{index}\n" for index in range(1001))), None)
    with pytest.raises(KeysRefused, match="more than 1048576 bytes"):
        known_keys(write(b"#" * 1_048_577), None)


def test_a_key_shows_itself_to_nobody_who_prints_it() -> None:
    assert "sesame" not in repr(Key.of("sesame", name="team-a"))


def test_each_key_is_a_tenant_of_its_own_and_none_is_nobodys() -> None:
    first, second = Key.of("a-key"), Key.of("another-key")
    assert first.tenant == Key.of("a-key", name="search").tenant
    assert first.tenant != second.tenant
    assert 0 < first.tenant < 2**63
