"""Which tiling is best for which product, and what does fusing gain over cuBLAS followed by elementwise kernels?

    python benchmarks/linear.py --output linear.json [--models qwen3 minilm …] [--quick]

Feeds `_RULES` of `worker/kernels/linear.py`: for every product of the models and every number of tokens, all
candidate tilings are checked against float32 and timed, and with them

- chosen: what runs now, by `_RULES`: a tiling, the library, or for SwiGLU above 512 tokens the kernel of
  `worker/kernels/swiglu_hopper.py`, which is no tiling, so that a best one to replace it must be the faster;
- cublas: `torch.nn.functional.linear` alone, which does less;
- whole: cuBLAS and then what our kernel has fused in, as the fastest of the ways there are.

Each variant is a CUDA graph of back-to-back calls on different copies of the weight, enough of them that no weight is
still in the L2 cache when its turn comes again, as in a model (MiniLM's six layers do fit there, and so it gets six
copies). All variants of a product take turns in one run; a number is the median over turns. Inputs are seeded normal
numbers, since the power that a product draws, and with it the clock, depends on them.

The ceiling ("floor" in the table) is the larger of two times: every byte once at 4.3 TB/s, every operation at
790 TFLOP/s, both measured on an H200 on 2026-11-29.

Compiling is spread over processes before anything is timed; a candidate that does not compile or run is left out and
named. Takes about two minutes on one H200 with 16 cores. Prints a table and the best tilings as source; the last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.record import origin
from worker.kernels import linear as kernels
from worker.kernels.linear import Epilogue, Tiling
from worker.kernels.rotary import qk_norm_rope_
from worker.kernels.swiglu import swiglu

BYTES_PER_S, FLOP_PER_S = 4.3e12, 790e12
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
QUICK_TOKENS = (32, 512, 4096)
# Together larger than the L2 cache of 60 MB, several times.
ROTATED_BYTES = 256e6
FEWEST_COPIES, MOST_COPIES = 8, 64
TURNS = 9
# Of the result, in the Frobenius norm: rounding to bfloat16 alone is 0.0017.
TOLERANCE = 4e-3
CHOSEN_TOLERANCE = 8e-3  # the library rounds in between as well
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 128, 16, 8
EPSILON = 1e-6
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a model and what follows it."""

    model: str
    name: str
    num_features: int
    num_rows: int
    epilogue: Epilogue
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    num_layers: int | None = None  # set where all layers' weights stay in the L2

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_features * self.num_rows

    @property
    def num_columns(self) -> int:
        return self.num_rows // 2 if self.epilogue == "swiglu" else self.num_rows

    @property
    def num_copies(self) -> int:
        if self.num_layers is not None:
            return self.num_layers
        return int(min(MOST_COPIES, max(FEWEST_COPIES, -(-ROTATED_BYTES // self.weight_bytes))))

    def floor_us(self, num_tokens: int) -> float:
        activations = 2 * num_tokens * (self.num_features + self.num_columns * (1 + self.residual))
        seconds = max((self.weight_bytes + activations) / BYTES_PER_S, self.flop(num_tokens) / FLOP_PER_S)
        return 1e6 * seconds

    def flop(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * self.num_features * self.num_rows


PRODUCTS = (
    Product("qwen3", "qkv", 1024, 4096, "rope"),
    Product("qwen3", "o", 2048, 1024, "plain", residual=True),
    Product("qwen3", "gate-up", 1024, 6144, "swiglu"),
    Product("qwen3", "down", 3072, 1024, "plain", residual=True),
    Product("minilm", "qkv", 384, 1152, "plain", bias=True, num_layers=6),
    Product("minilm", "o", 384, 384, "plain", bias=True, residual=True, num_layers=6),
    Product("minilm", "up", 384, 1536, "plain", bias=True, activation="gelu", num_layers=6),
    Product("minilm", "down", 1536, 384, "plain", bias=True, residual=True, num_layers=6),
    Product("bert-base", "qkv", 768, 2304, "plain", bias=True),
    Product("bert-base", "up", 768, 3072, "plain", bias=True, activation="gelu"),
    Product("bert-base", "down", 3072, 768, "plain", bias=True, residual=True),
    Product("bert-large", "qkv", 1024, 3072, "plain", bias=True),
    Product("bert-large", "up", 1024, 4096, "plain", bias=True, activation="gelu"),
    Product("bert-large", "down", 4096, 1024, "plain", bias=True, residual=True),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a product: a call for each copy of the weight."""

    name: str
    calls: list[Callable[[], torch.Tensor]]
    tiling: Tiling | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    x: torch.Tensor
    weights: list[torch.Tensor]
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(cls, product: Product, num_tokens: int, num_copies: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

        angles = torch.rand(32768, HEAD_DIM // 2, generator=generator, device="cuda") * 6.3
        scale = product.num_features**-0.5
        return cls(
            x=randn(num_tokens, product.num_features),
            weights=[randn(product.num_rows, product.num_features, scale=scale) for _ in range(num_copies)],
            bias=randn(product.num_rows) if product.bias else None,
            residual=randn(num_tokens, product.num_rows) if product.residual else None,
            q_norm=randn(HEAD_DIM),
            k_norm=randn(HEAD_DIM),
            cos=angles.cos(),
            sin=angles.sin(),
            positions=torch.arange(num_tokens, dtype=torch.int32, device="cuda") % 512,
        )

    def ours(self, product: Product, weight: torch.Tensor, tiling: Tiling | None) -> torch.Tensor:
        """With this tiling, or as `_RULES` say; then the residual may hold the result."""
        if product.epilogue == "swiglu":
            return kernels.swiglu_linear(self.x, weight, tiling=tiling)
        if product.epilogue == "rope":
            norms = (self.q_norm, self.k_norm, self.cos, self.sin, self.positions)
            return kernels.qk_norm_rope_linear(self.x, weight, *norms, NUM_HEADS, NUM_KV_HEADS, EPSILON, tiling=tiling)
        return kernels.linear(self.x, weight, self.bias, product.activation, self.residual, tiling=tiling)

    def with_own_residual(self) -> Inputs:
        return self if self.residual is None else dataclasses.replace(self, residual=self.residual.clone())

    def reference(self, product: Product, weight: torch.Tensor) -> torch.Tensor:
        if product.epilogue == "swiglu":
            return kernels.swiglu_reference(self.x, weight)
        if product.epilogue == "rope":
            norms = (self.q_norm, self.k_norm, self.cos, self.sin, self.positions)
            return kernels.qk_norm_rope_reference(self.x, weight, *norms, NUM_HEADS, NUM_KV_HEADS, EPSILON)
        return kernels.linear_reference(self.x, weight, self.bias, product.activation, self.residual)

    def unfused(self, product: Product) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Ways to compute the whole with cuBLAS, by name."""
        x, bias, residual = self.x, self.bias, self.residual
        if product.epilogue == "swiglu":
            return {"cublas, swiglu": lambda weight: swiglu(functional.linear(x, weight))}
        if product.epilogue == "rope":

            def rope(weight: torch.Tensor) -> torch.Tensor:
                qkv = functional.linear(x, weight)
                norms = (self.q_norm, self.k_norm, NUM_HEADS, NUM_KV_HEADS, EPSILON)
                qk_norm_rope_(qkv, self.positions, self.cos, self.sin, *norms)
                return qkv

            return {"cublas, rope": rope}
        if residual is not None:
            ways = {"cublas, add": lambda weight: functional.linear(x, weight, bias).add_(residual)}
            if bias is None:
                # The sum grows from call to call; the time does not depend on it.
                sums = residual.clone()
                ways["cublas into the residual"] = lambda weight: sums.addmm_(x, weight.t())
            return ways
        if product.activation is not None:
            return {"cublas, gelu": lambda weight: functional.gelu(functional.linear(x, weight, bias))}
        return {"cublas, bias": lambda weight: functional.linear(x, weight, bias)}


def candidates(product: Product, num_tokens: int) -> list[Tiling]:
    """At most eight a regime: what can be told from the outside to be worth a try."""
    found = list(_streaming(product, num_tokens)) if num_tokens <= 128 else []
    if 128 <= num_tokens <= 1024:
        found += _middling(product)
    if num_tokens >= 1024:
        found += _large(product)
    return list(dict.fromkeys(found))


def _streaming(product: Product, num_tokens: int) -> Iterator[Tiling]:
    m = min(64, num_tokens)
    num_blocks = product.num_features // 128
    splits = [n for n in (1, 2, 3, 4, 6, 8, 12) if num_blocks % n == 0]

    def closest(block_n: int, num_programs: int) -> int:
        tiles = -(-product.num_rows // block_n) * -(-num_tokens // m)
        return min(splits, key=lambda n: abs(n * tiles - num_programs))

    if product.epilogue == "rope":
        for programs in (64, 128, 264):
            yield Tiling(m, 128, 64, num_warps=4, num_stages=5, split_k=closest(128, programs))
        yield Tiling(m, 128, 64, num_warps=8, num_stages=5, split_k=closest(128, 128))
        yield Tiling(m, 128, 64, num_warps=4, num_stages=5, split_k=closest(128, 128), warm=True)
        yield Tiling(m, 128, 64, num_warps=4, num_stages=5, split_k=closest(128, 264), warm=True)
        return
    yield Tiling(m, 16, 128, num_warps=4, num_stages=4)
    yield Tiling(m, 32, 128, num_warps=4, num_stages=4, warm=True)
    for block_n, programs in ((32, 128), (32, 264), (64, 128)):
        split = closest(block_n, programs)
        yield Tiling(m, block_n, 128, num_warps=4, num_stages=4, split_k=split)
        yield Tiling(m, block_n, 128, num_warps=4, num_stages=4, split_k=split, warm=True)


def _middling(product: Product) -> Iterator[Tiling]:
    if product.epilogue != "rope":
        yield Tiling(64, 64, 128, num_warps=4, num_stages=4)
        if product.num_features % 256 == 0:
            yield Tiling(64, 64, 128, num_warps=4, num_stages=3, split_k=2)
        yield Tiling(128, 64, 64, num_warps=4, num_stages=4, tma=True)
    else:
        yield Tiling(64, 128, 64, num_warps=4, num_stages=4, split_k=2)
    yield Tiling(64, 128, 64, num_warps=4, num_stages=4)
    yield Tiling(64, 128, 64, num_warps=4, num_stages=4, tma=True)
    yield Tiling(128, 128, 64, num_warps=8, num_stages=4, tma=True)
    yield Tiling(64, 256, 64, num_warps=4, num_stages=4, tma=True)


def _large(product: Product) -> Iterator[Tiling]:
    yield Tiling(128, 128, 64, num_warps=8, num_stages=3, tma=True)
    yield Tiling(128, 128, 64, num_warps=8, num_stages=4, tma=True, persistent=True)
    yield Tiling(128, 256, 64, num_warps=8, num_stages=3)
    yield Tiling(128, 256, 64, num_warps=8, num_stages=4, tma=True)
    yield Tiling(128, 256, 64, num_warps=8, num_stages=4, tma=True, persistent=True)
    yield Tiling(128, 256, 64, num_warps=8, num_stages=4, tma=True, persistent=True, group_m=16)
    if product.epilogue != "rope":
        yield Tiling(256, 128, 64, num_warps=8, num_stages=4, tma=True, persistent=True)


def kind(product: Product, tiling: Tiling) -> tuple[object, ...]:
    """What a kernel is compiled for."""
    even = product.num_features % tiling.block_k == 0
    chunks = kernels._warm_chunks(tiling, product.num_features)
    return product.epilogue, product.bias, product.activation, product.residual, even, chunks, tiling


def compile_one(product: Product, tiling: Tiling) -> str | None:
    """Run a tiling once, in this process, so that its kernel is in the compiler's cache. Returns what went wrong."""
    try:
        inputs = Inputs.make(product, 16, 1)
        inputs.ours(product, inputs.weights[0], tiling)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # whatever it is, the candidate is left out, and named
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error).strip() else ''}"
    return None


def compile_all(wanted: list[tuple[Product, Tiling]], num_processes: int) -> set[tuple[Product, Tiling]]:
    """Compile in parallel; returns those that work."""
    working = set()
    # fork, before this process has touched the device: a new interpreter would import torch again.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        outcomes = pool.map(compile_one, *zip(*wanted, strict=True))
        for (product, tiling), problem in zip(wanted, outcomes, strict=True):
            if problem is None:
                working.add((product, tiling))
            else:
                print(f"left out: {product.model} {product.name} {describe(tiling)}: {problem}", flush=True)
    return working


def variants(product: Product, inputs: Inputs, tilings: list[Tiling]) -> list[Variant]:
    def each(way: Callable[[torch.Tensor], torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
        return [lambda weight=weight: way(weight) for weight in inputs.weights]

    found = [Variant("cublas", each(lambda weight: functional.linear(inputs.x, weight)))]
    found += [Variant(name, each(way)) for name, way in inputs.unfused(product).items()]
    # Here too a sum may grow from call to call.
    own = inputs.with_own_residual()
    found.append(Variant(CHOSEN, each(lambda weight: own.ours(product, weight, None))))
    for tiling in tilings:
        calls = each(lambda weight, tiling=tiling: inputs.ours(product, weight, tiling))
        found.append(Variant(describe(tiling), calls, tiling))
    return found


def measure(found: list[Variant], num_calls: int, turns: int, stream: torch.cuda.Stream) -> dict[str, float]:
    """Median microseconds of a call of each variant, captured on the stream."""
    graphs = {variant.name: torch.cuda.CUDAGraph() for variant in found}
    # Not `torch.cuda.graph`, which collects garbage and empties the allocator each time: most of the time of a run.
    with torch.cuda.stream(stream):
        for variant in found:
            variant.calls[0]()
            torch.cuda.synchronize()
            graphs[variant.name].capture_begin()
            for index in range(num_calls):
                variant.calls[index % len(variant.calls)]()
            graphs[variant.name].capture_end()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    events = {}
    for turn in range(-1, turns):
        for name, graph in graphs.items():
            events[name, turn] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[name, turn][0].record()
            graph.replay()
            events[name, turn][1].record()
    torch.cuda.synchronize()
    for (name, turn), (start, stop) in events.items():
        if turn >= 0:  # the first turn warms up
            samples[name].append(1e3 * start.elapsed_time(stop) / num_calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def describe(tiling: Tiling) -> str:
    text = f"{tiling.block_m}x{tiling.block_n}x{tiling.block_k} w{tiling.num_warps} s{tiling.num_stages}"
    text += f" k{tiling.split_k}" if tiling.split_k > 1 else ""
    text += f" g{tiling.group_m}" if tiling.group_m != 8 else ""
    return text + "".join(f" {flag}" for flag in ("tma", "persistent", "warm", "hopper") if getattr(tiling, flag))


def source(tiling: Tiling) -> str:
    """The tiling as it is written in `_RULES`."""
    required = f"{tiling.block_m}, {tiling.block_n}, {tiling.block_k}"
    named = [f"num_warps={tiling.num_warps}", f"num_stages={tiling.num_stages}"]
    for field in dataclasses.fields(Tiling)[5:]:
        if (value := getattr(tiling, field.name)) != field.default:
            named.append(f"{field.name}={value}")
    return f"Tiling({required}, {', '.join(named)})"


def run_cell(
    product: Product, inputs: Inputs, tilings: list[Tiling], turns: int, stream: torch.cuda.Stream
) -> dict[str, object]:
    """Check and time one product for one number of tokens."""
    num_tokens = inputs.x.shape[0]
    expected = inputs.reference(product, inputs.weights[0])
    correct, errors = [], {}
    for tiling in tilings:
        try:
            actual = inputs.ours(product, inputs.weights[0], tiling).float()
        except AssertionError:
            continue  # more tiles than its sum may be split for
        errors[tiling] = float((actual - expected).norm() / expected.norm())
        if errors[tiling] <= TOLERANCE:
            correct.append(tiling)
        else:
            name = f"{product.model} {product.name} T={num_tokens} {describe(tiling)}"
            print(f"WRONG: {name}: relative error {errors[tiling]:.1e}", flush=True)
    chosen = inputs.with_own_residual().ours(product, inputs.weights[0], None).float()
    chosen_error = float((chosen - expected).norm() / expected.norm())
    if not chosen_error <= CHOSEN_TOLERANCE:
        print(f"WRONG: {product.model} {product.name} T={num_tokens} as chosen: {chosen_error:.1e}", flush=True)
    found = variants(product, inputs, correct)
    num_calls = 8 if num_tokens > 1024 else max(20, len(inputs.weights))
    times = measure(found, num_calls, turns, stream)
    ours = {variant.tiling: times[variant.name] for variant in found if variant.tiling is not None}
    peers = {variant.name: times[variant.name] for variant in found if variant.tiling is None}
    best = min(ours, key=lambda tiling: ours[tiling])
    whole = min((name for name in peers if name not in ("cublas", CHOSEN)), key=lambda name: peers[name])
    return {
        "model": product.model,
        "product": product.name,
        "tokens": num_tokens,
        "features": product.num_features,
        "rows": product.num_rows,
        "epilogue": product.epilogue,
        "best": describe(best),
        "source": source(best),
        "best_us": ours[best],
        "error": errors[best],
        "chosen_us": peers[CHOSEN],
        "chosen_error": chosen_error,
        "cublas_us": peers["cublas"],
        "whole": whole,
        "whole_us": peers[whole],
        "floor_us": product.floor_us(num_tokens),
        "tflops": product.flop(num_tokens) / ours[best] / 1e6,
        "candidates_us": {describe(tiling): us for tiling, us in ours.items()},
        "peers_us": peers,
    }


def print_cell(cell: dict[str, object]) -> None:
    keys = ("best", "chosen", "cublas", "whole", "floor")
    best, chosen, cublas, whole, floor = (float(cell[f"{key}_us"]) for key in keys)  # type: ignore[arg-type]
    print(
        f"{cell['model']:<11}{cell['product']:<9}{cell['tokens']:>6}"
        f"{best:>9.1f}{chosen:>9.1f}{cublas:>9.1f}{whole:>9.1f}{floor:>9.1f}"
        f"{best / cublas:>7.2f}{best / whole:>7.2f}{floor / best:>7.2f}{cell['tflops']:>7.0f}  {cell['best']}",
        flush=True,
    )


def print_sources(cells: list[dict[str, object]]) -> None:
    """The best tilings, each with the number of tokens that it is best for."""
    for cell in cells:
        print(f"{cell['model']} {cell['product']}: ({cell['tokens']}, {cell['source']}),")


def main() -> None:
    """Compile, check, measure, print, write, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    models = tuple(dict.fromkeys(product.model for product in PRODUCTS))
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--tokens", nargs="+", type=int, default=None)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--quick", action="store_true", help="Qwen3 alone, three numbers of tokens, few turns")
    args = parser.parse_args()
    products = [product for product in PRODUCTS if product.model in (("qwen3",) if args.quick else args.models)]
    tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    turns = 3 if args.quick else args.turns

    began = time.monotonic()
    pairs = {(product, tiling): None for product in products for n in tokens for tiling in candidates(product, n)}
    # Products that differ in size alone share their kernels; one of them compiles for all.
    kinds = {kind(product, tiling): (product, tiling) for product, tiling in pairs}
    print(f"compiling {len(kinds)} kernels in {args.processes} processes", flush=True)
    working = compile_all(list(kinds.values()), args.processes)
    usable = {kind(product, tiling) for product, tiling in working}
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)

    header = f"{'model':<11}{'product':<9}{'tokens':>6}{'ours us':>9}{'chosen':>9}{'cublas':>9}{'whole':>9}{'floor':>9}"
    print(f"{header}{'/cub':>7}{'/whole':>7}{'floor/':>7}{'TFLOPs':>7}  best tiling")
    cells = []
    stream = torch.cuda.Stream()
    for product in products:
        for num_tokens in tokens:
            tilings = [tiling for tiling in candidates(product, num_tokens) if kind(product, tiling) in usable]
            inputs = Inputs.make(product, num_tokens, product.num_copies)
            cells.append(run_cell(product, inputs, tilings, turns, stream))
            print_cell(cells[-1])
    print_sources(cells)

    properties = torch.cuda.get_device_properties(0)
    result = {
        "benchmark": "linear",
        "device": properties.name,
        "torch": torch.__version__,
        "seconds": time.monotonic() - began,
        "cells": cells,
    }
    args.output.write_text(json.dumps({**result, **origin()}, indent=1) + "\n")
    # A layer of each model, in microseconds, with and without fusion.
    layers = {
        f"{model} {n}": {
            key: round(sum(float(str(c[f"{key}_us"])) for c in cells if c["model"] == model and c["tokens"] == n), 1)
            for key in ("best", "chosen", "cublas", "whole", "floor")
        }
        for model in dict.fromkeys(product.model for product in products)
        for n in tokens
    }
    print(f"{time.monotonic() - began:.0f} s")
    print(json.dumps({"benchmark": "linear", "device": properties.name, "layer_us": layers}))


if __name__ == "__main__":
    main()
