"""How a long list is divided into parts, so that a short request waits for one of them and not for all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from common.text.pairs import EncodeDocuments, Pair, PairNames
from common.text.tokenization import TruncationRule
from common.wire.messages import ModelFacts
from gateway.model_requests import PairsRequest
from gateway.tokenizing import Model, RequestTokenizer
from tests.gateway.conftest import CountingThreads


class OnePair:
    """Makes the same pair of whatever it is given."""

    def __init__(self, *, rereads_query: bool) -> None:
        self.rereads_query = rereads_query
        self.num_queries_read = 0

    def for_query(self, query: str, truncation: TruncationRule, **options: object) -> EncodeDocuments:
        self.num_queries_read += 1
        return lambda documents, names: [Pair(np.array([1], dtype=np.int32), 1)] * len(documents)


@pytest.mark.parametrize(
    ("queries", "documents", "instruction", "rereads_query", "num_parts"),
    [
        (["q"], ["d"] * 64, None, False, 1),
        (["q"], ["d"] * 65, None, False, 2),
        (["q"], ["d" * 20_000] * 6, None, False, 2),
        (["q" * 20_000], ["d"] * 6, None, False, 1),  # is tokenized once
        (["q" * 20_000], ["d"] * 6, None, True, 2),
        (["q" * 200_000], ["d"] * 6, None, True, 6),
        (["q"], ["d"] * 6, "i" * 20_000, True, 2),
        (["q" * 20_000] * 6, ["d"] * 6, None, False, 2),
        (["q" * 20_000] * 6, ["d"] * 6, None, True, 2),
        (["q" * 10_000] * 6, ["d"] * 6, "i" * 10_000, True, 2),
    ],
)
async def test_pairs_are_tokenized_in_parts_of_all_that_is_tokenized(
    facts: ModelFacts,
    queries: list[str],
    documents: list[str],
    instruction: str | None,
    rereads_query: bool,
    num_parts: int,
) -> None:
    threads = CountingThreads(1)
    pairs = OnePair(rereads_query=rereads_query)
    tokenized = await RequestTokenizer(threads, max_tokens=1000).tokenize_pairs(
        dataclasses.replace(Model.load(facts), pairs=pairs),
        PairsRequest(queries, documents, PairNames(), TruncationRule(allowed=True), instruction, None, "online"),
    )
    threads.close()
    assert tokenized.places == [0] * len(documents)
    assert threads.num_runs == num_parts
    assert pairs.num_queries_read == len(queries)  # and not once a part
