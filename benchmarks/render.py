"""What does it cost a gateway to write an answer?

    python benchmarks/render.py [--rows 64] [--dimensions 1024]

From rows in memory to the body of an answer of /v1/embeddings, in each format, on one thread. The floor of `float` is
one call of the JSON writer for the whole matrix (orjson, shortest decimals that give float32 back), which we do not
make, since it holds the interpreter's lock for all of it; of the others it is a copy of the bytes. Beside them the
standard library's `json.dumps` of the same rows as lists, and its base64. Goals for 64 rows of 1,024: float 2 ms,
base64 0.3 ms, int8 0.1 ms.

All variants take turns within one run; medians, with the 90th percentile beside them. Prints a table; the last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import orjson

from common.wire.messages import ModelFacts
from gateway.client import Rows
from gateway.formats import EncodingFormat
from gateway.model_requests import ModelOutput
from gateway.routes.openai import render

NUM_TURNS = 50
GOALS_MS = {"float": 2.0, "base64": 0.3, "base64_int8": 0.1}


def variants(num_rows: int, dimensions: int, facts: ModelFacts) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(7)
    floats = rng.standard_normal((num_rows, dimensions), dtype=np.float32)
    floats /= np.linalg.norm(floats, axis=1, keepdims=True)
    codes = rng.integers(-127, 128, (num_rows, dimensions), dtype=np.int8)

    def answer(rows: Rows, row_format: EncodingFormat) -> Callable[[], bytes]:
        output = ModelOutput(rows, facts, num_rows, "a request", {}, range(num_rows))
        return partial(render, output, name_of=lambda place: f"input[{place}]", row_format=row_format)

    return {
        "float": answer(floats, "float"),
        "base64": answer(floats, "base64"),
        "base64_int8": answer(codes, "base64_int8"),
        "one call of orjson": lambda: orjson.dumps(floats, option=orjson.OPT_SERIALIZE_NUMPY),
        "a copy of the floats": floats.tobytes,
        "the library's base64": lambda: [base64.b64encode(row) for row in floats],
        "json.dumps": lambda: json.dumps(floats.tolist()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dimensions", type=int, default=1024)
    arguments = parser.parse_args()
    facts = ModelFacts.__new__(ModelFacts)  # an answer holds nothing of them but the name
    object.__setattr__(facts, "name", "a model")
    measured = variants(arguments.rows, arguments.dimensions, facts)
    samples_ms: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(NUM_TURNS + 1):
        for name, write in measured.items():
            begin = time.perf_counter()
            write()
            if turn:  # the first one warms up
                samples_ms[name].append((time.perf_counter() - begin) * 1e3)
    print(f"{arguments.rows} rows of {arguments.dimensions}, {NUM_TURNS} turns\n")
    print(f"{'':<24}{'p50 ms':>10}{'p90 ms':>10}{'goal ms':>10}")
    result = {}
    for name, times_ms in samples_ms.items():
        p50, p90 = (float(value) for value in np.percentile(times_ms, (50, 90)))
        result[name] = {"p50_ms": round(p50, 4), "p90_ms": round(p90, 4)}
        goal = f"{GOALS_MS[name]:>10.1f}" if name in GOALS_MS else ""
        print(f"{name:<24}{p50:>10.3f}{p90:>10.3f}{goal}")
    print(json.dumps({"rows": arguments.rows, "dimensions": arguments.dimensions, "variants": result}))


if __name__ == "__main__":
    main()
