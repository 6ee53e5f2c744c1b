"""A worker whose model is a hash: the real worker process around an engine that costs what it is told to.

Everything but the model is the product's own (worker/process/state.py, server.py, compute.py: the socket, the
handshake, beats, draining, the watchdog), so what a fault does to it is what it does to a real one. The time of a step
is slept, so that capacity is set by a test and not by the machine. Some words of the tokenizer's are faults: a worker
that runs a sequence with one misbehaves, as often as the word stands there, counted over all workers of a suite; then
it is a word like any other. How much memory their devices have a test says while they run (`Memory`); what does not fit
runs in pieces, as the product does it.

    python -m tests.faults.oracle worker --folder MODEL --step-ms 10 --token-us 200

`--leak-bytes` has it keep so much for good of each sequence that it runs.

The argument `worker` is for who looks for the process. All else is configured as a worker is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import enum
import hashlib
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from common.config import WorkerConfig
from common.deploy.process import run_process
from common.metrics import Metrics, open_metrics
from common.wire.messages import Batch, ModelFacts, cu_seqlens
from tests.fakes import FACTS, TokenIds, oracle_rows
from worker.batch.lazy import LazyTensor, Rows
from worker.engine.oom_split import run_in_pieces
from worker.process.server import Server

NUM_WORDS = 4000
MAX_BATCH_TOKENS = 128


class Fault(enum.IntEnum):
    """What a token makes of the worker that runs it; the value is the token's id."""

    ABORT = 4
    HANG = 5  # the step does not end; Python goes on
    HANG_WITH_GIL = 6  # nothing of Python goes on
    EXIT = 7  # with status 0
    SHORT_RESULT = 8  # a row is missing
    NAN = 9  # its row is not finite
    WRONG_DIMENSION = 10  # rows are too narrow


_FIRST_WORD = 4 + len(Fault)
VOCAB_SIZE = _FIRST_WORD + NUM_WORDS


def write_model(folder: Path) -> None:
    """The folder of a model of which there is only the tokenizer: w0 … w3999 and the faults, framed by [CLS], [SEP]."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3}
    vocabulary |= {fault.name: int(fault) for fault in Fault}
    vocabulary |= {f"w{index}": _FIRST_WORD + index for index in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def token_ids(text: str) -> list[int]:
    """What the tokenizer makes of words, counted here once more."""
    known = {fault.name: int(fault) for fault in Fault}
    return [1, *(known.get(word) or _FIRST_WORD + int(word.removeprefix("w")) for word in text.split()), 2]


class Running:
    """What a worker is doing this moment, in a file that outlives it: how a test knows that it died in mid-batch."""

    def __init__(self, run_dir: str | Path, slot: int) -> None:
        path = Path(run_dir) / f"oracle-{slot}.running"
        if not path.exists():
            path.write_bytes(bytes(8))
        self._sequences = np.memmap(path, dtype=np.int64, mode="r+", shape=(1,))

    @property
    def num_sequences(self) -> int:
        """Of the batch that runs; 0 where none does."""
        return int(self._sequences[0])

    @num_sequences.setter
    def num_sequences(self, count: int) -> None:
        self._sequences[0] = count


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that an oracle worker began."""

    begun_s: float  # on the monotonic clock, which all processes share
    num_tokens: int
    digests: tuple[str, ...]  # of its sequences


class StepRecord:
    """Every step that a worker begins, a line each, in a file that outlives it."""

    def __init__(self, run_dir: str | Path, slot: int) -> None:
        self._file = os.open(Path(run_dir) / f"oracle-{slot}.steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, sequences: list[TokenIds]) -> None:
        digests = " ".join(map(digest, sequences))
        with contextlib.suppress(OSError):  # the disk is full, which is not this model's to fail of
            os.write(self._file, f"{time.monotonic()} {sum(map(len, sequences))} {digests}\n".encode())


def steps(run_dir: Path) -> list[Ran]:
    """All that the workers of a suite have begun, in order."""
    lines = [line for path in run_dir.glob("oracle-*.steps") for line in path.read_text().splitlines()]
    fields = [line.split() for line in lines]
    found = [Ran(float(begun), int(num_tokens), tuple(digests)) for begun, num_tokens, *digests in fields]
    return sorted(found, key=lambda step: step.begun_s)


def digest(sequence: TokenIds) -> str:
    return hashlib.sha256(np.asarray(sequence, dtype="<i4").tobytes()).hexdigest()[:16]


def beginnings(run_dir: Path) -> Callable[[str], list[float]]:
    """What gives the times, on the clock of `time.monotonic`, at which a text's sequence has been begun."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps(run_dir):
        for known in step.digests:
            found[known].append(step.begun_s)
    return lambda text: found.get(digest(token_ids(text)), [])


class Memory:
    """How many tokens fit into the devices of a suite's workers at once: a file that a test writes."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / "oracle.memory"

    @property
    def num_tokens(self) -> int | None:
        """None: as many as come."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None

    @num_tokens.setter
    def num_tokens(self, count: int | None) -> None:
        if count is None:
            self._path.unlink(missing_ok=True)
        else:
            new = self._path.with_suffix(".new")
            new.write_text(str(count))
            new.replace(self._path)


class OracleEngine:
    """What `Compute` needs of an engine. A step has ended when `step` returns, as on a CPU."""

    has_idle_work = False

    def __init__(
        self,
        run_dir: str,
        slot: int,
        facts: ModelFacts,
        step_s: float,
        token_s: float,
        metrics: Metrics,
        leak_bytes: int,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._memory = Memory(run_dir)
        self._metrics = metrics
        self._facts = facts
        self._step_s = step_s
        self._token_s = token_s
        self._leak_bytes = leak_bytes
        self._leaked: list[bytes] = []
        self._running = Running(run_dir, slot)
        self._running.num_sequences = 0  # the one before may have died in a batch
        self._record = StepRecord(run_dir, slot)

    def hello(self) -> ModelFacts:
        return self._facts

    def step(self, batch: Batch) -> LazyTensor:
        lazy = self._attempt(batch)
        if lazy is not None:
            return lazy
        rows = run_in_pieces(batch, self._attempt)
        return LazyTensor(lambda: rows)

    def _attempt(self, batch: Batch) -> LazyTensor | None:
        fitting = self._memory.num_tokens
        if fitting is not None and len(batch.token_ids) > fitting:
            self._metrics.memory_splits.inc()
            return None
        self._running.num_sequences = len(batch.lengths)
        sequences = [batch.token_ids[start:stop] for start, stop in pairwise(cu_seqlens(batch.lengths))]
        self._record.note(sequences)
        time.sleep(self._step_s + self._token_s * len(batch.token_ids))
        rows = oracle_rows(batch)
        finite = np.ones(len(rows), dtype=np.uint8)
        for index, sequence in enumerate(sequences):
            fault = self._due(sequence)
            if fault is Fault.NAN:
                finite[index] = 0
            elif fault is Fault.SHORT_RESULT:
                rows, finite = rows[:-1], finite[:-1]
            elif fault is Fault.WRONG_DIMENSION:
                rows = np.ascontiguousarray(rows[:, :-4])
            elif fault is not None:
                _misbehave(fault)
        if self._leak_bytes:
            self._leaked.extend(os.urandom(self._leak_bytes) for _ in batch.lengths)
        self._running.num_sequences = 0
        return LazyTensor(lambda: Rows(rows, finite))

    def idle_work(self) -> None:
        pass

    def check_device(self, error: Exception) -> None:
        pass

    def _due(self, sequence: TokenIds) -> Fault | None:
        """The fault that is to happen now for this sequence, noted as having happened."""
        fault = next((Fault(number) for number in sequence if number in iter(Fault)), None)
        times = sum(number == fault for number in sequence)
        for count in range(times):
            try:
                (self._run_dir / f"{digest(sequence)}-{count}.fault").touch(exist_ok=False)
            except FileExistsError:
                continue
            return fault
        return None


def _misbehave(fault: Fault) -> None:
    if fault is Fault.ABORT:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    elif fault is Fault.EXIT:
        os._exit(0)
    elif fault is Fault.HANG:
        time.sleep(3600)
    else:
        ctypes.PyDLL(None).sleep(3600)  # a PyDLL's functions are called with the GIL held


def _facts(folder: Path) -> ModelFacts:
    return dataclasses.replace(
        FACTS,
        folder=str(folder),
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        vocab_size=VOCAB_SIZE,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("role", choices=["worker"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--token-us", type=float, required=True)
    parser.add_argument("--leak-bytes", type=int, default=0)
    costs, flags = parser.parse_known_args()
    sys.argv[1:] = flags  # the rest is a worker's own

    def run(config: WorkerConfig, joined: Callable[[], None]) -> int:
        metrics = open_metrics(config.run_dir)

        def build() -> OracleEngine:
            facts = _facts(costs.folder)
            step_s, token_s = costs.step_ms / 1e3, costs.token_us / 1e6
            return OracleEngine(config.run_dir, config.slot, facts, step_s, token_s, metrics, costs.leak_bytes)

        return Server(config, metrics, build, joined).run()

    run_process("worker", WorkerConfig, run)


if __name__ == "__main__":
    main()
