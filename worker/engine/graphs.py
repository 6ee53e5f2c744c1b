"""Whole forward passes as CUDA graphs, captured when they turn out to be needed.

Launching a model's kernels one by one costs the host ten times what a small step costs the device. A graph replays all
of them at once, for one key: a capacity (`worker.batch.capacity`) and an attention backend. Lengths are not part of it,
so a few dozen keys serve any mix of requests.

The first use of a key runs eagerly, which also compiles what it needs. So a batch that never comes again costs no more
than that. From the second use on a capture is wanted. It is made when no batch has come for a moment, or in a step if
captures have taken less than a twentieth of the time lately (it delays that step, once, by some 20 ms). After that the
key is replayed. A key whose capture fails stays eager, and is reported.

All graphs share one pool of memory. They run one after the other on one stream, and each graph has saved its results
before the next one runs. torch frees a pool only as a whole. So when graphs take more than they may, all are dropped,
and the more recently used half of them is wanted again. This module knows no model.

While a capture runs, waiting for the device as a whole is an error on any thread, and spoils the capture. Other threads
wait through `synchronize`.

Rejected: `torch.cuda.graph`, which synchronises the device and empties the allocator's caches at each capture.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from worker.batch.capacity import Capacity

if TYPE_CHECKING:
    from common.metrics import Metrics
    from worker.engine.driver import Driver

logger = logging.getLogger(__name__)

_CAPTURE_SHARE = 0.05  # of the time, while batches wait
_MAX_HOT_KEYS = 256


class Key(NamedTuple):
    attention: str
    capacity: Capacity
    max_seqlen: int  # an upper bound for backends whose launch depends on it; 0 for the others


Forward = Callable[[Key], None]


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    handle: int  # of the instantiated graph, for the driver
    size_bytes: int  # of device memory that its capture took


class GraphRunner:
    """Runs forward passes on one stream: eagerly, or by replaying. One thread calls it, whose current stream is to be
    that one, but for `replay`; `synchronize` is for all."""

    def __init__(
        self,
        forward: Forward,
        warm_up: Callable[[Key], None],
        driver: Driver,
        stream: int,
        *,
        lazy: bool,
        max_bytes: int,
        hot_keys: Path,
        can_run: Callable[[Key], bool],
        metrics: Metrics,
    ) -> None:
        """
        Args:
            forward: launches a key's kernels on the inputs as they are; must not synchronise.
            warm_up: runs `forward` eagerly on inputs made for it.
            stream: the handle of the stream.
            lazy: whether keys are captured as they come along; else never, unless `capture` is called.
            max_bytes: of device memory that graphs may take.
            hot_keys: file of the keys that were in use; they are captured first next time.
            can_run: whether a key of that file, which another configuration may have written, means something here.
        """
        self._forward = forward
        self._warm_up = warm_up
        self._driver = driver
        self._stream = stream
        self._lazy = lazy
        self._max_bytes = max_bytes
        self._hot_keys = hot_keys
        self._metrics = metrics
        self._pool: object | None = None  # torch's handle, opaque
        self._captured: OrderedDict[Key, _Captured] = OrderedDict()  # the least recently used first
        self._compiled: set[Key] = set()  # what has run eagerly
        self._wanted: OrderedDict[Key, None] = OrderedDict()  # in the order in which they are captured
        self._failed: dict[Key, str] = {}
        self._size_bytes = 0
        self._lacking: int | None = None  # tokens of the smallest key that lacked memory; nothing larger is expected
        self._next_capture_s = 0.0
        self._capturing = threading.Lock()
        self._hot: set[Key] = set()  # of the last run, and not used in this one yet
        if lazy:
            self._wanted.update(dict.fromkeys(key for key in self._read_hot_keys() if can_run(key)))
            self._hot.update(self._wanted)

    def replay(self, key: Key) -> bool:
        """Launch a key's graph, if it has one; whether it has."""
        captured = self._captured.get(key)
        if captured is None:
            return False
        self._driver.launch_graph(captured.handle, self._stream)
        # After the launch, which the device may be waiting for.
        self._captured.move_to_end(key)
        return True

    def expects(self, key: Key) -> bool:
        """Whether a key without a graph will soon get one, and then take less time."""
        has_memory = self._lacking is None or key.capacity.tokens < self._lacking
        return self._lazy and has_memory and key not in self._failed

    def run(self, key: Key) -> bool:
        """Launch a key's forward pass; whether by replaying a graph."""
        if self.replay(key):
            return True
        self._hot.discard(key)
        if self._lazy and key in self._compiled and key not in self._failed:
            self._wanted[key] = None
            if time.monotonic() >= self._next_capture_s and self.capture(key):
                return self.run(key)
        self._forward(key)
        self._compiled.add(key)
        return False

    @property
    def has_idle_work(self) -> bool:
        """Whether `idle_work` has something to do."""
        return bool(self._wanted)

    def idle_work(self) -> None:
        """Capture one key that is wanted, if there is one: call it when there is nothing else to do."""
        if self._wanted:
            self.capture(next(iter(self._wanted)))

    def capture(self, key: Key) -> bool:
        """Capture a key now, unless it is captured; whether it is captured afterwards."""
        self._wanted.pop(key, None)
        if key in self._captured:
            return True
        started_s = time.monotonic()
        try:
            if key not in self._compiled:
                self._warm_up(key)
                self._compiled.add(key)
            with self._capturing:
                captured = self._capture(key)
        except torch.OutOfMemoryError:
            self._lacking = min(key.capacity.tokens, self._lacking or key.capacity.tokens)
            self._forget_empty_pool()
            torch.cuda.empty_cache()
            logger.info("no memory for a graph of %s now", _text(key))
            return False
        except Exception as error:  # noqa: BLE001  # whatever a capture dislikes: the key can still run eagerly
            torch.cuda.synchronize()  # raises if the device itself is broken
            self._forget_empty_pool()
            self._fail(key, f"{type(error).__name__}: {error}")
            return False
        finally:
            took_s = time.monotonic() - started_s
            self._next_capture_s = time.monotonic() + took_s / _CAPTURE_SHARE
        self._captured[key] = captured
        if self._lacking is not None and key.capacity.tokens >= self._lacking:
            self._lacking = None
        if key in self._hot:
            self._captured.move_to_end(key, last=False)  # keys that this run has used are kept longer
        self._size_bytes += captured.size_bytes
        self._metrics.graph_captures.labels("done").inc()
        self._metrics.graph_capture_seconds.observe(took_s)
        logger.debug("captured %s in %.1f ms, %d bytes", _text(key), took_s * 1000, captured.size_bytes)
        if self._size_bytes > self._max_bytes:
            self._shrink()
        self._show_size()
        self._write_hot_keys()
        return key in self._captured

    def synchronize(self, device: torch.device) -> None:
        """Wait for a capture to end, then for all work on the device.

        Raises:
            RuntimeError: the device has failed.
        """
        with self._capturing:
            torch.cuda.synchronize(device)

    def release(self) -> None:
        """Drop all graphs, and give their memory back."""
        # The last replay may still run; memory that a graph uses is not to be freed under it.
        torch.cuda.synchronize()
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._compiled.clear()  # whatever else was kept for a key may go with its memory
        self._size_bytes = 0
        self._forget_empty_pool()
        torch.cuda.empty_cache()
        self._show_size()

    def keys(self) -> list[Key]:
        """What is captured, the least recently used first."""
        return list(self._captured)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def _capture(self, key: Key) -> _Captured:
        free_before, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: what other threads do meanwhile (waiting for an event) does not spoil the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            self._forward(key)
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                pass  # it is the first error that says what went wrong
            raise
        graph.capture_end()
        free_after, _ = torch.cuda.mem_get_info()
        return _Captured(graph, graph.raw_cuda_graph_exec(), max(0, free_before - free_after))

    def _shrink(self) -> None:
        keys = list(self._captured)
        kept = keys[(len(keys) + 1) // 2 :]  # none of one
        logger.info("%d graphs take %d bytes: all dropped, %d wanted again", len(keys), self._size_bytes, len(kept))
        self._metrics.graph_evictions.inc(len(keys) - len(kept))
        if not kept:
            self._fail(keys[0], f"alone it takes {self._size_bytes} bytes, more than --max-graph-bytes")
        self.release()
        self._wanted.update(dict.fromkeys(reversed(kept)))

    def _fail(self, key: Key, why: str) -> None:
        self._failed[key] = why
        self._metrics.graph_captures.labels("failed").inc()
        logger.warning("%s stays without a graph: %s", _text(key), why)

    def _forget_empty_pool(self) -> None:
        """torch frees a pool with the last graph that uses it."""
        if not self._captured:
            self._pool = None

    def _show_size(self) -> None:
        self._metrics.graphs.set(len(self._captured))
        self._metrics.graph_bytes.set(self._size_bytes)

    def _read_hot_keys(self) -> list[Key]:
        try:
            entries = json.loads(self._hot_keys.read_text())
            return [
                Key(str(attention), Capacity(int(tokens), int(sequences), bool(types), bool(spans)), int(max_seqlen))
                for attention, (tokens, sequences, types, spans), max_seqlen in entries[:_MAX_HOT_KEYS]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s is not a list of graphs, ignored: %s", self._hot_keys, error)
            return []

    def _write_hot_keys(self) -> None:
        """A hint for the next start: the most recently used key first, written whenever a key is added."""
        still_hot = [key for key in self._wanted if key in self._hot]
        text = json.dumps([*reversed(self._captured), *still_hot][:_MAX_HOT_KEYS])
        temporary = self._hot_keys.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._hot_keys.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text)
            temporary.replace(self._hot_keys)
        except OSError as error:
            logger.warning("%s cannot be written, the next start will be without it: %s", self._hot_keys, error)


def _text(key: Key) -> str:
    return f"{key.capacity.tokens} tokens x {key.capacity.sequences} sequences with {key.attention}"
