"""Kernels that start while the one in front of them still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests.worker.kernels  # noqa: F401  # chooses the interpreter before Triton is imported
from worker.kernels.embedding import embed
from worker.kernels.launch import pdl_options
from worker.kernels.norm import add_rms_norm

# A driver stands in for that of an H200: kernels compile, and launches are noted down. By `python -c`, as this process
# may be set to interpret kernels.
COMPILE = """
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.backends.compiler import GPUTarget
from worker.kernels.launch import compiling, launch, open_compiler
from worker.kernels.norm import rms_norm

launched, compiled = [], []


class Driver:
    class utils:
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 1 << 20})
        load_binary = staticmethod(lambda name, *binary: (name, name, 0, 0, 1024))

    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append(source.name)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(Driver())
open_compiler()
triton.knobs.compilation.listener = lambda *, src, **rest: compiled.append(src.name)
rows, weight = torch.zeros(9, 64).bfloat16(), torch.zeros(64).bfloat16()
apart = torch.zeros(1 + 9 * 64).bfloat16()[1:].view(9, 64)  # not from a multiple of 16 bytes on
with ThreadPoolExecutor(2) as executor, compiling(executor):
    for num_rows in (1, 2, 9):
        rms_norm(rows[:num_rows], weight, 1e-6)
    rms_norm(apart, weight, 1e-6)
assert (len(launched), len(compiled)) == (0, 2), (launched, compiled)
rms_norm(rows[:5], weight, 1e-6)
rms_norm(apart[:5], weight, 1e-6)
assert (len(launched), len(compiled)) == (2, 2), (launched, compiled)
"""

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_on_a_cpu_no_kernel_starts_early() -> None:
    assert pdl_options(torch.empty(1)) == {"PDL": False}


@pytest.mark.thorough
@pytest.mark.slow
def test_launches_that_are_compiled_instead_are_compiled_once_a_kind_and_found_by_later_ones(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=60)


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
