"""Kernels that start while the one in front of them still runs."""

from __future__ import annotations

import pytest
import torch

import tests.worker.kernels  # noqa: F401  # chooses the interpreter before Triton is imported
from worker.kernels.embedding import embed
from worker.kernels.launch import pdl_options
from worker.kernels.norm import add_rms_norm

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_on_a_cpu_no_kernel_starts_early() -> None:
    assert pdl_options(torch.empty(1)) == {"PDL": False}


@pytest.mark.parametrize("num_tokens", [pytest.param(n, marks=gpu) for n in (1, 32, 500, 8000)])
def test_a_replayed_chain_computes_what_its_kernels_do_one_at_a_time(num_tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    table = torch.randn(1000, 1024, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(1024, generator=generator, device="cuda").bfloat16()
    token_ids = torch.zeros(num_tokens, dtype=torch.int32, device="cuda")

    def chain(*, wait: bool) -> torch.Tensor:
        summed = normed = embed(token_ids, table)
        for _ in range(100):
            if wait:
                torch.cuda.synchronize()
            normed, summed = add_rms_norm(normed, summed, weight, 1e-6)
        return normed

    chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain(wait=False)
    token_ids.random_(1000, generator=generator)
    graph.replay()
    replayed = output.clone()

    assert torch.equal(replayed, chain(wait=True))
