"""That the benchmark of the processes in front still runs through their code, and what it makes of its readings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.frontend import Cost, facts_of, gateway_stages, mixed_texts, scheduler_stages, write_tokenizer
from benchmarks.texts import LONGEST_TEXT, Corpus, invent_text
from common.metrics import Metrics
from common.wire.messages import ModelFacts


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(invent_text(LONGEST_TEXT + 100, seed=0))


@pytest.fixture
def facts(tmp_path: Path, corpus: Corpus) -> ModelFacts:
    write_tokenizer(tmp_path, corpus)
    return facts_of(tmp_path)


@pytest.mark.parametrize("together", [True, False])
def test_a_request_costs_something_at_every_stage_of_the_scheduler(
    metrics: Metrics, facts: ModelFacts, together: bool
) -> None:
    stages = scheduler_stages(2, metrics, facts, together=together)

    assert stages.pop("sum") == pytest.approx(sum(stages.values()))
    assert len(stages) == 6
    assert min(stages.values()) > 0


def test_a_request_costs_something_at_every_stage_of_a_gateway(
    metrics: Metrics, facts: ModelFacts, corpus: Corpus
) -> None:
    texts = [mixed_texts(corpus, 2), mixed_texts(corpus, 1)]

    stages = asyncio.run(gateway_stages(2, metrics, facts, texts, "float"))

    assert stages.pop("sum") == pytest.approx(sum(stages.values()))
    assert len(stages) == 5
    assert min(stages.values()) > 0


def test_what_a_core_can_do_follows_from_what_a_request_costs_it() -> None:
    cost = Cost(main_us=40.0, other_us=10.0, requests_per_s=9_000.0)

    assert (cost.per_main_core, cost.per_core) == (25_000, 20_000)
