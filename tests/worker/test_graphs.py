"""When a graph is captured, replayed, dropped or given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from common.metrics import Metrics
from worker.batch.capacity import Capacity
from worker.engine.driver import Driver
from worker.engine.graphs import GraphRunner, Key, _Captured

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Doubler:
    """A model: twice its input is its output, and how often it was launched."""

    def __init__(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        self.input = torch.zeros(64, device="cuda")
        self.output = torch.full((64,), -1.0, device="cuda")
        self.launches = 0
        self.warm_ups: list[Key] = []
        self.refuses: Exception | None = None

    def forward(self, key: Key) -> None:
        self.launches += 1
        tokens = key.capacity.tokens
        self.output[:tokens].copy_(self.input[:tokens] * 2)
        if self.refuses is not None and torch.cuda.is_current_stream_capturing():
            raise self.refuses

    def warm_up(self, key: Key) -> None:
        self.warm_ups.append(key)
        self.forward(key)


Start = Callable[..., GraphRunner]


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def start(doubler: Doubler, tmp_path: Path, metrics: Metrics) -> Start:
    def start(*, lazy: bool = True, max_bytes: int = 2**30) -> GraphRunner:
        return GraphRunner(
            doubler.forward,
            doubler.warm_up,
            Driver(),
            torch.cuda.current_stream().cuda_stream,
            lazy=lazy,
            max_bytes=max_bytes,
            hot_keys=tmp_path / "cache" / "hot.json",
            can_run=lambda key: key.attention == "triton",
            metrics=metrics,
        )

    return start


def key(tokens: int) -> Key:
    return Key("triton", Capacity(tokens, 8), 0)


class Stuck(GraphRunner):
    """Whose captures last until they are let go; it needs no device."""

    def __init__(self, folder: Path, metrics: Metrics) -> None:
        super().__init__(
            lambda _: None,
            lambda _: None,
            None,  # type: ignore[arg-type]  # nothing is launched
            0,
            lazy=False,
            max_bytes=1,
            hot_keys=folder / "hot.json",
            can_run=lambda _: True,
            metrics=metrics,
        )
        self.began = threading.Event()
        self.may_end = threading.Event()

    def _capture(self, key: Key) -> NoReturn:
        self.began.set()
        assert self.may_end.wait(10)
        raise KeyboardInterrupt  # what nobody handles leaves no lock behind either


def test_whoever_waits_for_the_device_waits_for_a_capture_to_end(tmp_path: Path, metrics: Metrics) -> None:
    graphs = Stuck(tmp_path, metrics)
    ended: list[str] = []

    def capture() -> None:
        with pytest.raises(KeyboardInterrupt):
            graphs.capture(key(64))
        ended.append("capture")

    def synchronize() -> None:
        with pytest.raises((AssertionError, RuntimeError)):  # there is no such device
            graphs.synchronize(torch.device("cuda", 99))
        ended.append("synchronize")

    threads = [threading.Thread(target=capture), threading.Thread(target=synchronize)]
    threads[0].start()
    assert graphs.began.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert ended == []
    graphs.may_end.set()
    for thread in threads:
        thread.join(10)

    assert sorted(ended) == ["capture", "synchronize"]


class Short(Stuck):
    """Which has no memory for a graph, or has."""

    has_memory = False

    def _capture(self, key: Key) -> _Captured:  # type: ignore[override]  # this one ends
        if not self.has_memory:
            raise torch.OutOfMemoryError
        return _Captured(None, 0, 0)  # type: ignore[arg-type]  # it is not replayed


def test_a_graph_is_expected_where_keys_get_one_but_not_of_one_that_cannot_or_while_memory_is_short(
    tmp_path: Path, metrics: Metrics
) -> None:
    assert not Stuck(tmp_path, metrics).expects(key(64))  # which captures nothing by itself
    graphs = Short(tmp_path, metrics)
    graphs._lazy = True
    assert graphs.expects(key(64))
    assert not graphs.capture(key(64))
    assert not graphs.expects(key(64))
    assert not graphs.expects(key(128))
    assert not graphs.capture(key(128))
    graphs.has_memory = True
    assert graphs.capture(key(128))
    assert graphs.expects(key(64))
    graphs.has_memory = False
    assert not graphs.capture(key(512))
    assert graphs.expects(key(64))  # of which it says nothing
    assert not graphs.expects(key(1024))
    graphs._fail(key(64), "it cannot")
    assert not graphs.expects(key(64))


class TestOnADevice:
    pytestmark = gpu

    def test_the_first_use_is_eager_the_second_captures_and_later_ones_replay(
        self, doubler: Doubler, start: Start
    ) -> None:
        graphs = start()

        graphs.run(key(8))
        assert (doubler.launches, graphs.keys()) == (1, [])
        graphs.run(key(8))
        assert (doubler.launches, graphs.keys()) == (2, [key(8)])
        doubler.input.fill_(3)
        graphs.run(key(8))

        assert doubler.launches == 2
        assert doubler.output[:9].tolist() == [6.0] * 8 + [-1.0]

    def test_under_load_a_second_key_waits_its_turn_and_runs_eagerly_meanwhile(
        self, doubler: Doubler, start: Start
    ) -> None:
        graphs = start()
        for _ in range(2):
            graphs.run(key(8))
        for _ in range(2):
            graphs.run(key(16))

        assert graphs.keys() == [key(8)]
        assert doubler.output[:17].tolist() == [0.0] * 16 + [-1.0]
        assert graphs.has_idle_work
        graphs.idle_work()
        assert graphs.keys() == [key(8), key(16)]
        assert not graphs.has_idle_work

    def test_without_graphs_everything_is_eager(self, doubler: Doubler, start: Start) -> None:
        graphs = start(lazy=False)

        for _ in range(3):
            graphs.run(key(8))

        assert doubler.launches == 3
        assert not graphs.has_idle_work

    def test_a_key_whose_capture_fails_stays_eager(
        self, doubler: Doubler, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        graphs = start()
        doubler.refuses = RuntimeError("this cannot be captured")

        for _ in range(4):
            graphs.run(key(8))

        assert graphs.keys() == []
        assert doubler.output[:9].tolist() == [0.0] * 8 + [-1.0]
        assert "8 tokens x 8 sequences with triton stays without a graph: RuntimeError: this cannot be captured" in (
            caplog.text
        )

    def test_after_a_failed_capture_others_are_captured(self, doubler: Doubler, start: Start) -> None:
        graphs = start()
        doubler.refuses = RuntimeError("this cannot be captured")
        graphs.capture(key(8))
        doubler.refuses = None

        assert graphs.capture(key(16))
        doubler.input.fill_(2)

        graphs.run(key(16))
        assert doubler.output[:17].tolist() == [4.0] * 16 + [-1.0]

    def test_beyond_the_cap_all_are_dropped_and_the_more_recently_used_half_is_wanted_again(
        self, doubler: Doubler, start: Start
    ) -> None:
        graphs = start()
        for tokens in (8, 16, 24, 32):
            graphs.capture(key(tokens))
        graphs.run(key(8))

        graphs._shrink()

        assert (graphs.keys(), graphs.size_bytes) == ([], 0)
        graphs.idle_work()
        graphs.idle_work()
        assert graphs.keys() == [key(8), key(32)]
        assert not graphs.has_idle_work
        doubler.input.fill_(1)
        graphs.run(key(32))
        assert doubler.output[:33].tolist() == [2.0] * 32 + [-1.0]

    def test_the_next_start_captures_what_was_hot(self, doubler: Doubler, start: Start) -> None:
        graphs = start()
        for tokens in (8, 16):
            graphs.capture(key(tokens))
        graphs.run(key(8))
        graphs.capture(key(24))
        doubler.warm_ups.clear()

        again = start()
        while again.has_idle_work:
            again.idle_work()

        assert doubler.warm_ups[0] == key(24)
        assert again.keys() == [key(16), key(8), key(24)]  # the hottest last, as it was

    def test_the_list_of_hot_keys_is_not_shortened_by_the_first_capture(self, doubler: Doubler, start: Start) -> None:
        graphs = start()
        for tokens in (8, 16, 24):
            graphs.capture(key(tokens))
        again = start()
        again.idle_work()

        third = start()
        while third.has_idle_work:
            third.idle_work()

        assert set(third.keys()) == {key(8), key(16), key(24)}

    def test_hot_keys_that_mean_nothing_here_are_left_out(self, doubler: Doubler, start: Start) -> None:
        graphs = start()
        graphs.capture(Key("gone", Capacity(8, 8), 0))

        assert not start().has_idle_work

    def test_without_memory_a_key_is_eager_now_and_captured_later(self, doubler: Doubler, start: Start) -> None:
        graphs = start()
        doubler.refuses = torch.OutOfMemoryError("no memory")
        assert not graphs.capture(key(8))
        doubler.refuses = None

        assert graphs.capture(key(8))

    def test_a_damaged_list_of_hot_keys_is_ignored(
        self, tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "hot.json").write_text('[["triton", 64]]')

        assert not start().has_idle_work
        assert "hot.json is not a list of graphs, ignored" in caplog.text

    def test_releasing_gives_the_memory_back_and_keys_can_be_captured_again(
        self, doubler: Doubler, start: Start
    ) -> None:
        graphs = start()
        graphs.capture(key(8))

        graphs.release()

        assert (graphs.keys(), graphs.size_bytes) == ([], 0)
        assert graphs.capture(key(8))
