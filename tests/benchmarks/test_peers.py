"""The comparison with others: who takes part, what they are asked, and what is told of it."""

from __future__ import annotations

import argparse
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import peers
from benchmarks.peers import Contender, Record, Refused, Served, report
from common.config import DEFAULT_MODEL
from common.model_location import ModelNotFound, find_model


class Answers(http.server.BaseHTTPRequestHandler):
    """OpenAI's shape: of each text a vector of its length and 1."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = [{"index": index, "embedding": [len(text), 1]} for index, text in enumerate(body["input"])]
        content = json.dumps({"data": data}).encode()
        self.send_response(200 if body["model"] == "model" else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def serve(url: str, model: str = "model") -> Served:
    return Served("other", url, model, None, argparse.Namespace(texts_per_request=3, clients=2))


def test_a_servers_rows_come_in_the_order_of_the_texts(url: str) -> None:
    served = serve(url)
    rows, seconds = served.embed(["a" * length for length in range(1, 11)])
    served.close()
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert seconds > 0


def test_a_server_that_refuses_is_not_waited_for(url: str, tmp_path: Path) -> None:
    served = serve(url, "another")
    with pytest.raises(Refused, match="404"):
        served.wait(tmp_path / "none.log")
    served.close()


class Fixed(Contender):
    """Takes so long for a text, and answers the same vector."""

    def __init__(self, name: str, seconds: float, vector: list[float]) -> None:
        super().__init__(name, None)
        self._seconds, self._vector = seconds, vector

    def embed(self, texts: list[str]) -> tuple[np.ndarray, float]:
        return np.array([self._vector] * len(texts), dtype=np.float32), self._seconds * len(texts)


def test_the_table_has_ratios_to_sentence_transformers_and_the_least_cosine(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Fixed("sentence-transformers", 0.010, [1.0, 0.0])
    fast = Fixed("other", 0.004, [0.6, 0.8])
    table = report(peers.measure([slow, fast], [f"text {number}" for number in range(10)], rounds=2, seed=0))
    assert table["other"]["texts_per_s"] == pytest.approx(250)
    assert table["other"]["texts_ratio"] == pytest.approx(2.5)
    assert table["other"]["query_ratio"] == pytest.approx(0.4)
    assert table["other"]["least_cosine"] == pytest.approx(0.6)
    assert capsys.readouterr().out.splitlines()[1].startswith("other ")


def test_a_ratio_is_of_one_round_since_the_machine_is_another_in_the_next() -> None:
    rows = [np.array([[1.0, 0.0]])] * 3
    calm = Record([1.0, 1.0, 1.0], [100.0, 100.0, 20.0], [1.0, 1.0, 1.0], rows)
    other = Record([1.0, 1.0, 1.0], [200.0, 200.0, 40.0], [1.0, 1.0, 1.0], rows)
    table = report({"sentence-transformers": calm, "other": other})
    assert table["other"]["texts_ratio"] == 2.0


def test_who_is_not_installed_or_does_not_start_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "sentence-transformers" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").symlink_to(sys.executable)  # without the library
    args = argparse.Namespace(environments=tmp_path, threads=1, dtypes=[], url=[], url_model="")
    assert peers.start_all(args, "model", tmp_path / "no-model", tmp_path) == []
    told = capsys.readouterr().err
    assert "sentence-transformers: left out, since it ended" in told
    assert "vllm: not installed" in told


def test_texts_are_cut_to_what_the_model_takes() -> None:
    try:
        folder = find_model(DEFAULT_MODEL).path
    except ModelNotFound:
        pytest.skip("the demonstration model is not installed")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    short, long = peers._cut(["a word", "unbelievably long " * 400], folder)
    assert short == "a word"
    assert limit - 1 <= len(tokenizer.encode(long).ids) <= limit
