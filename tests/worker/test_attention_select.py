"""How a backend is chosen, with backends and timings that are made up; on a GPU, that the real ones can be timed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import WorkerConfig
from worker.attention import Attention, AttentionUnavailable, HeadShape
from worker.attention.measure import LONGEST, SEQUENCES, TOKENS, Cell, Measurement, _formula, lengths_of, qkv
from worker.attention.reference import attend
from worker.attention.registry import BACKENDS, Backend
from worker.attention.select import Selection, select
from worker.batch.ragged import Mask

CPU = torch.device("cpu")
SHAPE = HeadShape(num_heads=16, num_kv_heads=8, head_dim=128, causal=True, dtype=torch.bfloat16)


class FakeAttention(Attention):
    """Does nothing."""

    def __call__(self, query: torch.Tensor, key: object, value: object, batch: object, mask: object) -> torch.Tensor:
        return query


def backend(name: str, build: Callable[..., Attention] = lambda *_: FakeAttention(), **changes: Any) -> Backend:  # noqa: ANN401
    return Backend(name, build, device="cpu", **changes)


@dataclass
class Timings:
    """Answers what a function of backend and class says, and counts."""

    us: Callable[[str, Cell], float]
    prepare_us: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    num_calls: int = 0

    def __call__(self, attention: Attention, cell: Cell) -> Measurement:
        self.num_calls += 1
        prepare_us = self.prepare_us if attention.name == "planned" else 0.0
        return Measurement(self.us(attention.name, cell), prepare_us, self.errors.get(attention.name, 0.001), 0.99999)


def short_and_long(name: str, cell: Cell) -> float:
    """`short` is the faster for short sequences, `long` for long ones."""
    return 5.0 if (name == "short") == (cell.longest <= 128) else 10.0


def measured(
    cache: Path,
    timings: Callable[[Attention, Cell], Measurement],
    names: tuple[str, ...] = ("short", "long"),
    *,
    num_layers: int = 10,
    max_tokens: int = 32768,
    shape: HeadShape = SHAPE,
    budget_s: float = 60.0,
    **backends: Backend,
) -> Selection:
    return Selection.measured(
        shape,
        CPU,
        num_layers=num_layers,
        max_tokens=max_tokens,
        cache=cache,
        backends={name: backend(name) for name in names} | backends,
        measure=timings,
        budget_s=budget_s,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "attention.json"


# --- choosing ---


@pytest.mark.parametrize(
    ("tokens", "sequences", "longest", "name"),
    [
        (64, 8, 1, "short"),
        (512, 32, 20, "short"),
        (512, 32, 128, "short"),
        (512, 32, 129, "long"),
        (4096, 512, 4000, "long"),
        (999_999, 99_999, 20, "short"),
        (999_999, 99_999, 99_999, "long"),
    ],
)
def test_the_fastest_of_the_class_is_chosen(cache: Path, tokens: int, sequences: int, longest: int, name: str) -> None:
    selection = measured(cache, Timings(short_and_long))

    assert selection.choose(tokens, sequences, longest).name == name


def test_empty_rows_are_told_apart(cache: Path) -> None:
    selection = measured(
        cache, Timings(lambda name, cell: 50.0 if name == "long" and cell.sequences > 32 else 20.0 - len(name))
    )

    assert selection.choose(512, 32, 20).name == "short"
    assert selection.choose(512, 512, 20).name == "short"


def test_every_backend_can_be_asked_for_by_name() -> None:
    choices = next(item for item in dataclasses.fields(WorkerConfig) if item.name == "attention").metadata["choices"]

    assert choices == ("auto", *BACKENDS)


def test_as_fast_within_three_percent_the_first_wins(cache: Path) -> None:
    selection = measured(cache, Timings(lambda name, cell: 10.2 if name == "first" else 10.0), ("first", "second"))

    assert [attention.name for attention in selection.backends()] == ["first"]


def test_what_the_host_prepares_counts_for_short_steps_and_not_for_long_ones(cache: Path) -> None:
    timings = Timings(lambda name, cell: 10.0 if name == "planned" else 15.0, prepare_us=100.0)

    selection = measured(cache, timings, ("plain", "planned"), num_layers=10)

    assert selection.choose(4096, 32, 512).name == "plain"  # 15 against 10 + 100 / 10
    assert selection.choose(16384, 32, 512).name == "planned"


def test_many_layers_share_what_the_host_prepares(cache: Path) -> None:
    timings = Timings(lambda name, cell: 10.0 if name == "planned" else 15.0, prepare_us=100.0)

    selection = measured(cache, timings, ("plain", "planned"), num_layers=28)

    assert selection.choose(4096, 32, 512).name == "planned"


def test_only_backends_in_use_are_kept(cache: Path) -> None:
    selection = measured(cache, Timings(lambda name, cell: 1.0 if name == "long" else 2.0))

    assert [attention.name for attention in selection.backends()] == ["long"]
    assert selection.named("long").name == "long"
    with pytest.raises(KeyError):
        selection.named("short")


def test_the_description_names_backends_by_longest_sequence(cache: Path) -> None:
    selection = measured(
        cache, Timings(short_and_long), other=backend("other", module="not_there", requirement="it==1")
    )

    text = selection.describe()

    assert text.startswith("≤128: short; ≤32768: long; measured in ")
    assert text.endswith("; without other (the log says why)")


def test_the_description_names_the_more_frequent_first_where_sizes_of_batches_differ(cache: Path) -> None:
    selection = measured(
        cache, Timings(lambda name, cell: 5.0 if (name == "long") == (cell.tokens > 64 or cell.longest > 32) else 9.0)
    )

    assert selection.describe().startswith("≤32: long, short; ≤32768: long; measured in ")


# --- disqualifying ---


def test_a_wrong_backend_is_out_everywhere(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    timings = Timings(short_and_long, errors={"long": 0.02})

    selection = measured(cache, timings)

    assert [attention.name for attention in selection.backends()] == ["short"]
    assert "attention long is out: wrong at" in caplog.text
    assert "without long" in selection.describe()


def test_a_backend_that_returns_nan_is_out(cache: Path) -> None:
    selection = measured(cache, Timings(short_and_long, errors={"long": float("nan")}))

    assert [attention.name for attention in selection.backends()] == ["short"]


def test_a_backend_that_fails_is_out_with_its_traceback_in_the_log(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(attention: Attention, cell: Cell) -> Measurement:
        if attention.name == "long" and cell.tokens == 2048:
            raise TypeError("an argument that there is not")
        return Measurement(short_and_long(attention.name, cell), 0.0, 0.0, 1.0)

    selection = measured(cache, measure)

    assert [attention.name for attention in selection.backends()] == ["short"]
    assert "an argument that there is not" in caplog.text
    assert "Traceback" in caplog.text


def test_if_all_are_wrong_there_is_no_attention(cache: Path) -> None:
    with pytest.raises(AttentionUnavailable, match="no attention backend can be had"):
        measured(cache, Timings(short_and_long, errors={"long": 1.0, "short": 1.0}))

    assert not cache.exists()


def test_a_backend_that_would_have_to_be_compiled_first_is_no_candidate(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    selection = measured(cache, Timings(short_and_long), ("short",), long=backend("long", is_built=lambda shape: False))

    assert [attention.name for attention in selection.backends()] == ["short"]
    assert (
        "attention long is no candidate: its kernels are not compiled; starting once with --attention long does"
        in caplog.text
    )


# --- measuring no more than it takes ---


def test_when_the_time_is_up_the_rest_is_as_what_is_near(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    timings = Timings(lambda name, cell: 1.0 if name == "short" else 2.0)

    selection = measured(cache, timings, budget_s=0.0)

    assert timings.num_calls == 2  # one class of two backends
    assert {selection.choose(t, s, length).name for t in TOKENS for s in SEQUENCES for length in LONGEST} == {"short"}
    assert "classes were measured in 0 s" in caplog.text


def calls_of(name: str, us: Callable[[str, Cell], float], cache: Path) -> set[Cell]:
    """The classes in which a backend was measured."""
    seen: set[Cell] = set()

    def measure(attention: Attention, cell: Cell) -> Measurement:
        if attention.name == name:
            seen.add(cell)
        return Measurement(us(attention.name, cell), 0.0, 0.0, 1.0)

    measured(cache, measure)
    return seen


def test_what_is_slow_with_few_rows_is_not_measured_with_more(cache: Path) -> None:
    seen = calls_of("long", lambda name, cell: 21.0 if name == "long" and cell.sequences == 128 else 10.0, cache)

    assert Cell(512, 128, 32) in seen
    assert Cell(512, 512, 32) not in seen
    assert Cell(4096, 512, 2048) not in seen


def test_what_is_slow_for_many_tokens_is_not_measured_for_the_most(cache: Path) -> None:
    seen = calls_of("long", lambda name, cell: 21.0 if name == "long" and cell.tokens in {2048, 4096} else 10.0, cache)

    assert Cell(4096, 8, 512) in seen
    assert Cell(16384, 8, 2048) not in seen


def test_a_backend_is_not_chosen_for_more_rows_than_it_is_for(cache: Path) -> None:
    fast = backend("fast", max_rows=256)

    selection = measured(cache, Timings(lambda name, cell: 1.0 if name == "fast" else 2.0), ("any",), fast=fast)

    assert {selection.choose(t, 512, length).name for t in TOKENS for length in LONGEST} == {"any"}
    assert {selection.choose(t, 128, length).name for t in TOKENS for length in LONGEST} == {"fast"}


def test_a_backend_that_is_slow_to_open_is_measured_with_the_others(cache: Path) -> None:
    late = backend("late", slow_to_open=True)

    selection = measured(cache, Timings(lambda name, cell: 1.0 if name == "late" else 2.0), ("any",), late=late)

    assert [attention.name for attention in selection.backends()] == ["late"]


@pytest.mark.parametrize(("other", "chosen"), [("short", {"short"}), ("gone", {"short", "late"})])
def test_a_backend_that_another_stands_in_for_is_opened_only_without_that_one(
    cache: Path, other: str, chosen: set[str]
) -> None:
    late = backend("late", instead=other)

    selection = measured(cache, Timings(short_and_long), ("short",), late=late)

    assert {attention.name for attention in selection.backends()} == chosen
    assert ("without late" in selection.describe()) == (other == "short")


def test_a_backend_that_is_slow_to_open_and_does_not_is_left_out(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(shape: HeadShape, device: torch.device) -> Attention:
        raise AttentionUnavailable("does not load")

    late = backend("late", broken, slow_to_open=True)

    selection = measured(cache, Timings(lambda name, cell: 1.0), ("any",), late=late)

    assert [attention.name for attention in selection.backends()] == ["any"]
    assert "attention late: does not load" in caplog.text


# --- keeping what was measured ---


def test_a_second_start_does_not_measure(cache: Path) -> None:
    measured(cache, Timings(short_and_long))
    timings = Timings(short_and_long)

    selection = measured(cache, timings)

    assert timings.num_calls == 0
    assert selection.choose(512, 32, 20).name == "short"
    assert selection.choose(512, 32, 300).name == "long"
    assert "as measured before" in selection.describe()
    assert [path.name for path in cache.parent.iterdir()] == ["attention.json"]


def test_another_head_shape_is_measured_anew(cache: Path) -> None:
    measured(cache, Timings(short_and_long))
    timings = Timings(short_and_long)

    measured(cache, timings, shape=replace(SHAPE, causal=False))

    assert timings.num_calls > 0


def test_another_set_of_backends_is_measured_anew(cache: Path) -> None:
    measured(cache, Timings(short_and_long))

    selection = measured(cache, Timings(lambda name, cell: 1.0 if name == "new" else 2.0), ("short", "long", "new"))

    assert selection.choose(512, 32, 20).name == "new"


def text_of(cache: Path, **changes: object) -> str:
    return json.dumps(json.loads(cache.read_text()) | changes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: "",
        lambda cache: cache.read_text()[:-40],
        lambda cache: "[]",
        lambda cache: "null",
        lambda cache: text_of(cache, cells=[]),
        lambda cache: text_of(cache, cells=[{"cell": {"tokens": 64}, "us": {}}]),
        lambda cache: text_of(
            cache, cells=[{"cell": {"tokens": 64, "sequences": 8, "longest": 32}, "us": {"gone": 1}}]
        ),
        lambda cache: text_of(cache, cells=[{"cell": {"tokens": 64, "sequences": 8, "longest": 32}, "us": None}]),
    ],
    ids=["empty", "cut off", "a list", "null", "no cells", "half a cell", "an unknown backend", "no times"],
)
def test_a_damaged_file_is_reported_and_measured_anew(
    cache: Path, damage: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    measured(cache, Timings(short_and_long))
    intact = json.loads(cache.read_text())
    cache.write_text(damage(cache))
    timings = Timings(short_and_long)

    selection = measured(cache, timings)

    assert timings.num_calls > 0
    assert selection.choose(512, 32, 20).name == "short"
    assert "measuring anew" in caplog.text
    assert json.loads(cache.read_text()) == intact


def test_a_file_that_cannot_be_written_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("where a folder should be")

    selection = measured(tmp_path / "file" / "attention.json", Timings(short_and_long))

    assert selection.choose(512, 32, 20).name == "short"
    assert "cannot be written" in caplog.text


def test_a_chosen_backend_that_no_longer_opens_is_replaced(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(cache, Timings(short_and_long))

    def broken(shape: HeadShape, device: torch.device) -> Attention:
        raise AttentionUnavailable("does not load")

    selection = measured(cache, Timings(short_and_long), ("short",), long=backend("long", broken))

    assert [attention.name for attention in selection.backends()] == ["short"]
    assert "attention long: does not load" in caplog.text


# --- asking for one ---


def test_without_a_gpu_it_is_sdpa(tmp_path: Path) -> None:
    selection = select("auto", SHAPE, CPU, tmp_path)

    assert selection.choose(100, 3, 50).name == "sdpa"
    assert selection.describe() == "sdpa, the one for CPUs"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_float32_on_a_gpu_it_is_triton(tmp_path: Path) -> None:
    importlib.import_module("tests.worker.kernels")  # chooses the interpreter before Triton is imported

    selection = select("auto", replace(SHAPE, dtype=torch.float32), torch.device("cuda"), tmp_path)

    assert {selection.choose(t, 8, length).name for t in TOKENS for length in LONGEST} == {"triton"}
    assert selection.describe() == "triton, the one that computes in torch.float32 on a GPU"


def test_a_forced_backend_runs_everything(tmp_path: Path) -> None:
    selection = select("reference", SHAPE, CPU, tmp_path)

    names = {selection.choose(t, s, length).name for t in TOKENS for s in SEQUENCES for length in LONGEST}
    assert names == {"reference"}
    assert selection.describe() == "reference, as asked for"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flash", r"there is no attention backend 'flash'; there are auto, triton, flash_attention_4, torch"),
        ("triton", "attention triton: is for GPUs"),
        ("flashinfer_fa3", "attention flashinfer_fa3: is for GPUs"),
    ],
)
def test_a_forced_backend_that_cannot_be_had_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(AttentionUnavailable, match=reason):
        select(name, SHAPE, CPU, tmp_path)


def test_each_shape_and_longest_sequence_has_a_file_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path] = []
    monkeypatch.setattr(Selection, "measured", lambda *args, cache, **kwargs: paths.append(cache))
    shapes = [
        replace(SHAPE, **change)
        for change in ({}, {"num_heads": 32}, {"num_kv_heads": 4}, {"head_dim": 64}, {"causal": False})
    ] + [replace(SHAPE, dtype=torch.float16)]

    for shape in shapes:
        for max_tokens in (512, 32768):
            select("auto", shape, torch.device("cuda"), tmp_path, max_tokens=max_tokens)

    assert paths[0] == tmp_path / "attention-16-8-128-causal-bfloat16-512.json"
    assert len(set(paths)) == 12


# --- classes ---


def all_cells() -> list[Cell]:
    return [Cell(t, s, longest) for t in TOKENS for s in SEQUENCES for longest in LONGEST]


def test_typical_lengths_are_of_their_class() -> None:
    typical = {cell: lengths_of(cell) for cell in all_cells()}

    found = {cell: lengths for cell, lengths in typical.items() if lengths is not None}
    assert len(found) == 64
    assert all(lengths.sum() == cell.tokens for cell, lengths in found.items())
    assert all(lengths.min() >= 1 for lengths in found.values())
    assert all(cell.longest / 4 < lengths.max() <= cell.longest for cell, lengths in found.items() if cell.longest > 32)
    assert all(
        cell.sequences / 4 < len(lengths) <= cell.sequences for cell, lengths in found.items() if cell.sequences > 8
    )


def test_typical_lengths_are_the_same_each_time() -> None:
    cell = Cell(4096, 128, 512)

    first, second = lengths_of(cell), lengths_of(cell)

    assert first is not None
    assert np.array_equal(first, second)
    assert len(set(first.tolist())) > 20


def test_no_class_longer_than_the_model_takes_is_measured(cache: Path) -> None:
    seen: set[int] = set()

    def measure(attention: Attention, cell: Cell) -> Measurement:
        seen.add(cell.longest)
        return Measurement(1.0, 0.0, 0.0, 1.0)

    measured(cache, measure, max_tokens=512)

    assert seen == {32, 128, 512}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("max_masked", [50, 2048], ids=["token by token", "with a mask"])
def test_results_are_compared_with_the_formula(causal: bool, max_masked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.attention.measure._MAX_MASKED", max_masked)
    lengths = np.array([3, 70, 40], dtype=np.int32)
    offsets = np.array([0, 3, 73, 113], dtype=np.int32)
    tensors = qkv(replace(SHAPE, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32), 113, CPU)

    rows, expected = _formula(*tensors, lengths, offsets, causal=causal)

    parts = zip(*(tensor.split(lengths.tolist()) for tensor in tensors), strict=True)
    full = torch.cat([attend(query, key, value, Mask(causal)) for query, key, value in parts])
    assert rows.tolist()[:4] == [0, 1, 2, 3]
    assert rows.tolist()[-1] == 112
    torch.testing.assert_close(expected, full[rows], rtol=0, atol=1e-6)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("default")  # packages warn of what they do themselves, when they compile
def test_on_a_gpu_what_there_is_is_measured_and_kept(tmp_path: Path) -> None:
    device = torch.device("cuda")

    selection = select("auto", SHAPE, device, tmp_path / "folder")
    again = select("auto", SHAPE, device, tmp_path / "folder")

    (kept,) = (tmp_path / "folder").iterdir()
    assert kept.name == "attention-16-8-128-causal-bfloat16-32768.json"
    costs_us = [entry["us"] for entry in json.loads(kept.read_text())["cells"]]
    assert all(costs_us)
    assert {"triton", "torch"} <= set(costs_us[0])
    assert [b.name for b in again.backends()] == [b.name for b in selection.backends()]
    assert again.describe().partition(";")[0] == selection.describe().partition(";")[0]
