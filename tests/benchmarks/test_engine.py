"""The floor, the peer and the mixture of the engine's benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine import Costs, Shape, counters, engine_variant, lowest_cosine, mixed_hour, mixed_lengths
from benchmarks.plain import PlainQwen3, as_matrix
from benchmarks.trace import Started, batch_of, start_engine
from tests.models import pplx_config, qwen3_config, write_pplx, write_qwen3
from worker.checkpoint.declared import Checkpoint
from worker.models.families.qwen3 import Qwen3Config

# Qwen3-0.6B without its mask.
COSTS = Costs(linear_weights=440_400_000, num_layers=28, attention_width=2048, causal=False)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    folder = tmp_path_factory.mktemp("engine")
    write_qwen3(folder / "model", config=qwen3_config(max_position_embeddings=4096))
    return start_engine(str(folder / "model"), "off", str(folder / "cache"), device="cpu")


def test_the_floor_of_a_short_step_is_reading_the_weights_once() -> None:
    assert COSTS.floor_ms(Shape(32, 1)) == pytest.approx(0.205, abs=0.001)


def test_the_floor_of_a_long_step_is_its_operations() -> None:
    assert COSTS.floor_ms(Shape(512, 32)) == pytest.approx(20.7, abs=0.1)


def test_a_shape_is_named_by_the_tokens_that_it_really_has() -> None:
    assert Shape.parse("512x25") == Shape(length=20, num_sequences=25)
    assert Shape.parse("512x25").name == "500x25"


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_forward_pass_gives_the_vectors_of_the_engine(tmp_path: Path, causal: bool) -> None:
    folder = tmp_path / "model"
    if causal:
        write_qwen3(folder, config=qwen3_config())
    else:
        write_pplx(folder, config=pplx_config())
    checkpoint = Checkpoint.read(folder)
    config = Qwen3Config.parse(checkpoint.architecture, checkpoint.config)
    engine = start_engine(str(folder), "off", str(tmp_path / "cache"), device="cpu").engine
    batch = batch_of([11, 11, 11], engine.hello())

    plain = PlainQwen3(folder, config, checkpoint.poolings[0], torch.device("cpu"), torch.float32)
    rows = plain(as_matrix(batch), reference=True).numpy()

    np.testing.assert_allclose(engine_variant(engine)(batch)(), rows, atol=2e-6)


def test_the_costs_of_a_model_are_read_from_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(write_qwen3(tmp_path / "model", config=qwen3_config()))

    costs = Costs.read(checkpoint, Qwen3Config.parse(checkpoint.architecture, checkpoint.config))

    # Three layers: q, k, v, o of 32 x (64 + 32 + 32 + 64), gate, up, down of 32 x 48.
    assert costs == Costs(3 * (32 * 192 + 3 * 32 * 48), num_layers=3, attention_width=64, causal=True)


def test_the_lowest_cosine_is_that_of_the_worst_row() -> None:
    rows = np.array([[1.0, 0.0], [2.0, 0.0]], dtype=np.float32)
    expected = np.array([[3.0, 0.0], [1.0, 1.0]], dtype=np.float32)

    assert lowest_cosine(rows, expected) == pytest.approx(0.5**0.5)


def test_mixed_batches_keep_to_the_budget(started: Started) -> None:
    facts, generator = started.engine.hello(), np.random.default_rng(0)

    batches = [mixed_lengths(facts, generator)[0] for _ in range(300)]

    assert max(sum(lengths) for lengths in batches if len(lengths) > 1) <= facts.max_batch_tokens
    assert min(min(lengths) for lengths in batches) == 3
    assert max(max(lengths) for lengths in batches) <= 2048


def test_a_mixed_hour_counts_what_it_ran(started: Started) -> None:
    result = mixed_hour(started, num_batches=3, limit_s=10)

    assert result["batches"] == 3
    assert result["graphs"] == result["captures"] == 0


def test_counters_are_read_by_name_and_label(started: Started) -> None:
    started.metrics.graph_runs.labels("replay").inc(3)

    assert counters(started.metrics)["hedgerow_graph_runs_total replay"] == 3
