"""The two loads of mixed.py come from where they say, at once, and are counted apart."""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.clients import Target
from benchmarks.mixed import measure
from benchmarks.texts import Corpus

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TOKENS_OF_A_TEXT = 7


class Server(ThreadingHTTPServer):
    """Answers with a token count and no vectors, and notes who asked for what."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[tuple[str, int]] = Counter()  # by lane and number of texts
        self.texts: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        texts = [fields["input"]] if isinstance(fields["input"], str) else fields["input"]
        self.server.asked[fields.get("lane", ""), len(texts)] += 1
        self.server.texts += texts
        body = json.dumps({"data": [], "usage": {"prompt_tokens": TOKENS_OF_A_TEXT * len(texts)}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_phase_has_its_loads_and_no_other(server: Server) -> None:
    args = argparse.Namespace(
        rate=40.0,
        query_tokens=5,
        lane="backfill",
        backfill_clients=2,
        texts_per_request=3,
        document_tokens=20,
        rounds=1,
        seconds=1.0,
        warm_up=0.2,
        pause=0.0,
        seed=0,
    )
    target = Target("127.0.0.1", server.server_address[1], "/v1/embeddings", "m")

    phases = measure(args, target, Corpus.read(None))

    assert set(server.asked) == {("online", 1), ("backfill", 3)}
    assert len(set(server.texts)) > 0.9 * len(server.texts)  # two processes do not send the same
    assert {phase: set(loads) for phase, loads in phases.items()} == {
        "queries": {"queries"},
        "backfill": {"backfill"},
        "both": {"queries", "backfill"},
    }
    for loads in phases.values():
        for seen in loads.values():
            assert not seen.errors
    for phase in ("queries", "both"):
        queries = phases[phase]["queries"]
        assert 20 <= len(queries.latencies_s) == len(queries.late_s) <= 60
        assert queries.num_tokens == TOKENS_OF_A_TEXT * len(queries.latencies_s)
    for phase in ("backfill", "both"):
        backfill = phases[phase]["backfill"]
        assert backfill.num_tokens == 3 * TOKENS_OF_A_TEXT * len(backfill.latencies_s) > 0
