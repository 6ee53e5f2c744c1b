"""The catalogue across processes: each in a child, since prometheus_client keeps one folder a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import Histogram

from common import metrics

COUNT = """
import sys
from common.metrics import open_metrics
metrics = open_metrics(sys.argv[1])
metrics.inputs.inc(3)
metrics.queue_seconds.observe(0.02)
metrics.queued_tokens.set(7)
metrics.requests.labels("/health", 200).inc()
"""
RENDER = "import sys; from common.metrics import render; sys.stdout.buffer.write(render(sys.argv[1]))"


def run(script: str, run_dir: str) -> str:
    command = [sys.executable, "-c", script, run_dir]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.mark.slow
def test_what_dead_processes_counted_stays_in_one_file_and_their_gauges_go(run_dir: str) -> None:
    for _ in range(3):
        run(COUNT, run_dir)
    for _ in range(2):  # looking twice counts nothing twice
        text = run(RENDER, run_dir)
        assert "hedgerow_inputs_total 9.0" in text
        assert "hedgerow_queue_seconds_count 3.0" in text
        assert 'hedgerow_requests_total{route="/health",status="200"} 3.0' in text
        assert "hedgerow_queued_tokens 7.0" not in text
    assert {path.name for path in Path(run_dir, "metrics").glob("*.db")} == {"counter_0.db", "histogram_0.db"}


@pytest.mark.slow
def test_files_of_processes_that_have_only_begun_to_write_are_passed_over(run_dir: str) -> None:
    run(COUNT, run_dir)
    for pid in (os.getpid(), 2**22 + 1):  # one that lives, and one that was killed at its start
        for kind in ("counter", "gauge_liveall", "histogram"):
            Path(run_dir, "metrics", f"{kind}_{pid}.db").touch()
    assert "hedgerow_inputs_total 3.0" in run(RENDER, run_dir)


@pytest.mark.slow
def test_of_several_models_each_has_its_own_counts_and_gateways_have_theirs_once(run_dir: str) -> None:
    for folder in (run_dir, f"{run_dir}/A", f"{run_dir}/B", f"{run_dir}/B"):
        run(COUNT, folder)
    text = metrics.render(run_dir, ["A", "B"]).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.startswith(("hedgerow_inputs", "hedgerow_queue_seconds_count"))] == [
        "hedgerow_inputs_total 3.0",
        'hedgerow_queue_seconds_count{model="A"} 1.0',
        'hedgerow_queue_seconds_count{model="B"} 2.0',
    ]
    assert 'hedgerow_requests_total{route="/health",status="200"} 1.0' in lines
    assert text.count("# TYPE hedgerow_queue_seconds histogram") == 1
    assert len(lines) == len({line.partition(" ")[0] for line in lines})


def test_what_gateways_count_is_in_the_catalogue() -> None:
    catalogue = {found._name for found in vars(metrics.Metrics()).values()}
    assert catalogue >= metrics._OF_GATEWAYS | metrics._OF_BOTH


@pytest.mark.slow
def test_the_disk_has_room_for_all_that_a_process_will_count_before_it_counts(run_dir: str) -> None:
    run(COUNT, run_dir)
    found = {path.name.partition("_")[0]: path.stat() for path in Path(run_dir, "metrics").glob("*.db")}
    assert {name: status.st_size for name, status in found.items()} == {
        "counter": 131_072,
        "gauge": 16_384,
        "histogram": 131_072,
    }
    assert all(status.st_blocks * 512 >= status.st_size for status in found.values())


@pytest.mark.slow
def test_the_file_of_what_the_dead_have_counted_is_as_long_as_it_needs_to_be(run_dir: str) -> None:
    many = COUNT + "for key in range(1500): metrics.key_tokens.labels(f'{sys.argv[1]}-{key}' * 2).inc()"
    run(many, run_dir)
    text = run(RENDER, run_dir)
    assert text.count("hedgerow_key_tokens_total{") == 1500
    sums = Path(run_dir, "metrics", "counter_0.db").stat()
    assert sums.st_blocks * 512 >= sums.st_size > 131_072


@pytest.mark.slow
def test_a_new_suite_counts_from_nothing(run_dir: str) -> None:
    run(COUNT, run_dir)
    metrics.clear(run_dir)
    assert "hedgerow_inputs_total" not in run(RENDER, run_dir)


def test_amounts_observed_together_count_as_they_do_one_by_one() -> None:
    apart, together = metrics.Metrics().queue_seconds, metrics.Metrics().queue_seconds
    amounts = [0.0, 0.001, 0.0011, 0.0011, 0.7, 61.5]  # 0.001 is a bucket's bound, and 61.5 beyond all of them
    for amount in amounts:
        apart.observe(amount)

    metrics.observe_all(together, amounts)

    def samples(histogram: Histogram) -> list[tuple[str, dict[str, str], float]]:
        (family,) = histogram.collect()
        return [(one.name, one.labels, one.value) for one in family.samples if not one.name.endswith("_created")]

    assert samples(together) == samples(apart)
    assert ("hedgerow_queue_seconds_count", {}, 6.0) in samples(together)
