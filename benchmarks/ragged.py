"""Does padding cost anything here? And what does the engine itself do on real mixtures of lengths?

    OMP_WAIT_POLICY=passive python benchmarks/ragged.py [--model MODEL] [--device cpu] [--dtype float32] [--threads N]

The engine alone: no gateway, no scheduler, no sockets; from a batch of token ids to rows on the host.

- Skew: one sequence of 256 tokens with 31 of 4, against the same number of tokens and sequences in nearly equal lengths
  (28 of 12 and 4 of 11). Where sequences are padded to the longest, the first costs 8,192 tokens and the second 384:
  21 times as much. Here both are 380 tokens. The ceiling is not quite 1: attention over 256 tokens is itself 256² and
  not 32 × 12² products, 1 % of all operations of a small model, and one that the CPU does less well. Goal: at most 1.3.
- Single: one query of 10 tokens, the least that a request can cost.
- Mixture: batches filled first come, first served up to the model's token budget from a log-normal distribution of
  lengths (median 15, 90th percentile 182, cut to 3 … 256: short questions with some long passages), in tokens and
  sequences a second. The ceiling is what the machine's matrix products give, which is printed beside it: the same
  number of operations as one product of the model's largest shape.

All variants take turns within one run, so that a machine that slows down slows all of them; medians of these turns,
with the 90th percentile beside them. The lengths are seeded; the token ids are random, which costs the same as text.
Machine: any CPU or CUDA device; 2 cores and all-MiniLM-L6-v2 unless the table says otherwise. Run it on an idle
machine: with more threads than free cores, the threads wait for each other.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.config import DEFAULT_MODEL, WorkerConfig
from common.metrics import Metrics
from common.model_location import find_model
from common.wire.messages import Batch
from common.wire.rows import FLOAT32
from worker.engine.engine import Engine

LONG, SHORT, NUM_SHORT = 256, 4, 31
MEDIAN_LENGTH, SIGMA, SHORTEST, LONGEST = 15, 1.947, 3, 256
GOAL = 1.3


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds over the turns of one variant."""

    p50: float
    p90: float

    @classmethod
    def of(cls, samples_ms: list[float]) -> Timing:
        return cls(float(np.percentile(samples_ms, 50)), float(np.percentile(samples_ms, 90)))


def make_batch(lengths: list[int], engine: Engine, generator: np.random.Generator) -> Batch:
    facts = engine.hello()
    return Batch(
        epoch=1,
        batch_id=1,
        token_ids=generator.integers(0, facts.vocab_size, sum(lengths)).astype(np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        dimensions=np.full(len(lengths), facts.dimensions, dtype=np.int32),
        normalize=np.ones(len(lengths), dtype=np.uint8),
        encodings=np.full(len(lengths), FLOAT32, dtype=np.uint8),
    )


def equal_lengths(num_tokens: int, num_sequences: int) -> list[int]:
    """As equal as whole numbers can be."""
    base, extra = divmod(num_tokens, num_sequences)
    return [base + 1] * extra + [base] * (num_sequences - extra)


def mixed_batches(budget: int, count: int, generator: np.random.Generator) -> list[list[int]]:
    """Lengths of `count` batches, each as full as the order of arrival lets it be."""
    batches: list[list[int]] = [[]]
    while len(batches) <= count:
        length = int(np.clip(round(generator.lognormal(np.log(MEDIAN_LENGTH), SIGMA)), SHORTEST, LONGEST))
        if sum(batches[-1]) + length > budget:
            batches.append([])
        batches[-1].append(length)
    return batches[:count]


def measure(variants: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, list[list[float]]]:
    """Milliseconds [calls, rounds] of each variant's calls, all variants taking turns."""
    samples: dict[str, list[list[float]]] = {name: [[] for _ in calls] for name, calls in variants.items()}
    for turn in range(-2, rounds):
        for name, calls in variants.items():
            for index, call in enumerate(calls):
                began_ns = time.perf_counter_ns()
                call()
                if turn >= 0:  # the first two turns warm up
                    samples[name][index].append((time.perf_counter_ns() - began_ns) / 1e6)
    return samples


def num_operations(lengths: npt.NDArray[np.int64], hidden: int, intermediate: int, num_layers: int) -> float:
    """Multiplications and additions of an encoder's matrix products and attention."""
    linear = 2 * (4 * hidden * hidden + 2 * hidden * intermediate) * int(lengths.sum())
    attention = 4 * hidden * int((lengths**2).sum())
    return float(num_layers * (linear + attention))


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = find_model(args.model)
    engine = Engine(model, WorkerConfig(run_dir="unused", device=args.device, dtype=args.dtype), Metrics())
    facts = engine.hello()
    config = json.loads((model.path / "config.json").read_text())
    generator = np.random.default_rng(0)
    skewed = [SHORT] * 15 + [LONG] + [SHORT] * (NUM_SHORT - 15)
    even = equal_lengths(sum(skewed), len(skewed))
    mixture = mixed_batches(facts.max_batch_tokens, 8, generator)

    def step(lengths: list[int]) -> Callable[[], object]:
        batch = make_batch(lengths, engine, generator)
        return lambda: engine.step(batch).numpy()

    left = torch.randn(sum(skewed), config["hidden_size"])
    right = torch.randn(config["intermediate_size"], config["hidden_size"])
    samples = measure(
        {
            "single": [step([10])] * 5,
            "skewed": [step(skewed)],
            "even": [step(even)],
            "mixture": [step(lengths) for lengths in mixture],
            "product": [lambda: torch.nn.functional.linear(left, right)] * 5,
        },
        args.rounds,
    )

    flat = {name: [ms for call in calls for ms in call] for name, calls in samples.items()}
    timings = {name: Timing.of(values) for name, values in flat.items()}
    ratios = np.array(samples["skewed"][0]) / np.array(samples["even"][0])
    num_tokens = sum(map(sum, mixture))
    # A round of the mixture is all its batches one after the other.
    rounds_s = np.array(samples["mixture"]).sum(axis=0) / 1e3
    tokens_per_s = float(np.median(num_tokens / rounds_s))
    sequences_per_s = float(np.median(sum(map(len, mixture)) / rounds_s))
    operations = sum(
        num_operations(
            np.array(lengths), config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        )
        for lengths in mixture
    )
    gflops = float(operations / np.median(rounds_s) / 1e9)
    product_gflops = 2 * left.numel() * right.shape[0] / timings["product"].p50 / 1e6

    print(f"{facts.name}, {facts.dtype} on {facts.device}, attention {facts.attention}, {args.threads} threads")
    print(f"{'variant':<34}{'tokens':>8}{'sequences':>11}{'p50 ms':>9}{'p90 ms':>9}")
    for name, lengths in (("single", [10]), ("skewed", skewed), ("even", even)):
        timing = timings[name]
        print(f"{name:<34}{sum(lengths):>8}{len(lengths):>11}{timing.p50:>9.2f}{timing.p90:>9.2f}")
    print(f"skewed / even, median of {args.rounds} turns: {np.median(ratios):.2f} (goal {GOAL}, padded 21.3)")
    print(f"mixture: {tokens_per_s:,.0f} tokens/s, {sequences_per_s:,.0f} sequences/s, {gflops:.0f} GFLOP/s")
    print(f"one plain float32 product on the CPU, for comparison: {product_gflops:.0f} GFLOP/s")
    result = {
        "benchmark": "ragged",
        "model": facts.name,
        "dtype": facts.dtype,
        "device": facts.device,
        "threads": args.threads,
        "single_ms": {"p50": timings["single"].p50, "p90": timings["single"].p90},
        "skewed_ms": {"p50": timings["skewed"].p50, "p90": timings["skewed"].p90},
        "even_ms": {"p50": timings["even"].p50, "p90": timings["even"].p90},
        "skewed_to_even": {"p50": float(np.median(ratios)), "p90": float(np.percentile(ratios, 90))},
        "tokens_per_s": tokens_per_s,
        "sequences_per_s": sequences_per_s,
        "gflops": gflops,
        "product_gflops": product_gflops,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
