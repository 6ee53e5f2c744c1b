"""The engine on a CUDA device: graphs, padding, memory, and the numbers of every capacity against plain float32."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.config import WorkerConfig
from common.wire.messages import Batch
from tests.models import bert_config, bert_tensors, make_batch, qwen3_config, qwen3_tensors, write_bert, write_qwen3
from tests.reference import BertReference, unit
from tests.worker.conftest import make_engine
from worker.attention import Attention
from worker.batch.ragged import Mask, RaggedBatch
from worker.checkpoint.files import ModelError
from worker.engine.engine import Engine
from worker.engine.precompile import Precompilation
from worker.engine.runner import DeviceRunner
from worker.engine.selfcheck import verify
from worker.models.output import Output

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MAX_TOKENS = 32_768
HIDDEN = 256


def write_wide_qwen3(folder: Path) -> Path:
    """Two layers with the heads of Qwen3-0.6B: large enough for every kernel, small enough for every length."""
    config = qwen3_config(
        hidden_size=HIDDEN,
        head_dim=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        num_hidden_layers=2,
        max_position_embeddings=MAX_TOKENS,
    )
    return write_qwen3(folder, config=config, tensors=qwen3_tensors(config))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("wide")
    return make_engine(
        write_wide_qwen3(folder / "model"), device="cuda", cache_dir=str(folder / "cache"), max_batch_tokens="16384"
    )


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine._runner, DeviceRunner)
    return engine._runner


def random_batch(lengths: list[int], seed: int) -> Batch:
    generator = np.random.default_rng(seed)
    sequences = [generator.integers(0, 64, length).tolist() for length in lengths]
    return make_batch(sequences, width=HIDDEN, normalize=[1] * len(lengths))


def embed(engine: Engine, batch: Batch) -> npt.NDArray[np.float32]:
    return engine.step(batch).numpy().rows.view(np.float32)


def lowest_cosine(rows: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float((unit(rows) * unit(expected)).sum(axis=1).min())


@pytest.mark.slow
@pytest.mark.parametrize("edge", [64, 128, 448, 512, 640, 1024, 1280, 4096, 8192, 16384])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_every_capacity_edge_stays_close_to_float32(engine: Engine, edge: int, offset: int) -> None:
    num_tokens = edge + offset
    batch = random_batch([num_tokens // 2, 1, num_tokens - num_tokens // 2 - 1], seed=edge + offset)
    expected = runner_of(engine).reference(batch)

    for _ in range(3):  # eager, captured or eager again, replayed
        assert lowest_cosine(embed(engine, batch), expected) >= 0.999
        while engine.has_idle_work:
            engine.idle_work()


@pytest.mark.slow
@pytest.mark.parametrize("num_sequences", [1, 2, 7, 8, 9, 32, 33, 128, 129, 511, 512])
def test_every_number_of_sequences_stays_close_to_float32(engine: Engine, num_sequences: int) -> None:
    lengths = np.random.default_rng(num_sequences).integers(1, 9, num_sequences).tolist()
    batch = random_batch(lengths, seed=num_sequences)

    assert lowest_cosine(embed(engine, batch), runner_of(engine).reference(batch)) >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300, 2048, 8192, MAX_TOKENS])
def test_every_length_stays_close_to_float32(engine: Engine, length: int) -> None:
    batch = random_batch([length], seed=length)

    assert lowest_cosine(embed(engine, batch), runner_of(engine).reference(batch)) >= 0.999


def test_a_graph_computes_the_same_bits_as_eager_launches(engine: Engine, tmp_path: Path) -> None:
    batch = random_batch([20] * 25, seed=3)
    backend = next(backend for backend in runner_of(engine).backends() if backend.name == "triton")
    runner = DeviceRunner.build(
        engine._model,
        Output(["last"], [], engine._model.shape.hidden_size),
        WorkerConfig(run_dir="unused", cache_dir=str(tmp_path)),
        max_tokens=512,
        largest_batch_tokens=512,
        device=engine._device,
        fingerprint="another",
        metrics=engine._metrics,
    )

    replayed = runner.run_with(batch, backend, "graph").numpy()  # of a key that has never run
    eager = runner.run_with(batch, backend, "eager").numpy()

    assert len(runner.graphs.keys()) == 1
    np.testing.assert_array_equal(replayed.rows, eager.rows)


def test_a_step_is_typical_once_its_capacity_has_a_graph_or_where_it_will_never_have_one(
    engine: Engine, tmp_path: Path
) -> None:
    def runner_with(graphs: str) -> DeviceRunner:
        return DeviceRunner.build(
            engine._model,
            Output(["last"], [], engine._model.shape.hidden_size),
            WorkerConfig(run_dir="unused", cache_dir=str(tmp_path), graphs=graphs),
            max_tokens=MAX_TOKENS,
            largest_batch_tokens=MAX_TOKENS,
            device=engine._device,
            fingerprint=f"typical-{graphs}",
            metrics=engine._metrics,
        )

    def is_typical(runner: DeviceRunner, batch: Batch) -> bool:
        lazy = runner.run(batch)
        lazy.numpy()
        while runner.has_idle_work:
            runner.idle_work()
        return lazy.is_typical

    small, large = random_batch([20] * 25, seed=4), random_batch([16_385], seed=4)
    runner = runner_with("lazy")
    assert [is_typical(runner, small) for _ in range(4)] == [False, False, True, True]  # eager, on its way, replayed
    assert is_typical(runner, large)
    assert is_typical(runner_with("off"), small)


@pytest.mark.slow
def test_steps_of_every_kind_find_their_kernels_compiled_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from worker.attention import triton as attention
    from worker.kernels import embedding, linear, norm, rotary, swiglu, swiglu_hopper, tail

    runner = runner_of(engine)
    backend = next(backend for backend in runner.backends() if backend.name == "triton")
    for module in (attention, embedding, linear, norm, rotary, swiglu, swiglu_hopper, tail):
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()
    compiled = []

    ahead = Precompilation(engine._device)
    ahead.start(engine._model, runner._output)
    ahead.wait()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **kernel: compiled.append(kernel["repr"]))
    for lengths in ([1], [20] * 25, [100], [60] * 4, [500], [700], [2000], [3000], [8] * 500, [16_000]):
        runner.run_with(random_batch(lengths, seed=1), backend, "eager").numpy()

    assert compiled == []


@pytest.mark.slow
def test_all_graphs_are_there_before_an_eager_start_is_ready(tmp_path: Path) -> None:
    folder = write_wide_qwen3(tmp_path / "model")
    engine = make_engine(folder, device="cuda", cache_dir=str(tmp_path / "cache"), graphs="eager-start")
    captures = engine._metrics.graph_captures

    batch = random_batch([20] * 25, seed=9)
    expected = runner_of(engine).reference(batch)

    assert len(runner_of(engine).graphs.keys()) >= 40
    assert captures.labels("failed")._value.get() == 0  # type: ignore[attr-defined]  # the library's own
    assert lowest_cosine(embed(engine, batch), expected) >= 0.999


class FailingAttention(Attention):
    """Raises when a step is half launched."""

    name = "failing"

    def __call__(self, *inputs: object) -> torch.Tensor:
        raise RuntimeError("half launched")


@pytest.mark.parametrize("num_failures", [1, 2, 3, 4])
def test_a_step_that_fails_half_launched_leaves_those_around_it_right(engine: Engine, num_failures: int) -> None:
    runner = runner_of(engine)
    before, after = random_batch([30, 5], seed=1), random_batch([7] * 9, seed=2)
    expected = [runner.reference(batch) for batch in (before, after)]
    for batch in (before, after):
        engine._runner.run_ready(batch).numpy()

    running = engine.step(before)
    for _ in range(num_failures):
        with pytest.raises(RuntimeError, match="half launched"):
            runner.run_with(before, FailingAttention(), "eager")
    following = engine.step(after)

    assert lowest_cosine(running.numpy().rows.view(np.float32), expected[0]) >= 0.999
    assert lowest_cosine(following.numpy().rows.view(np.float32), expected[1]) >= 0.999


@pytest.mark.slow
def test_a_thousand_rounds_of_large_and_small_batches_stay_right(engine: Engine) -> None:
    batches = [random_batch(lengths, seed) for seed, lengths in enumerate(([5], [300] * 12, [20] * 25, [1], [2000, 3]))]
    expected = [embed(engine, batch) for batch in batches]
    generator = np.random.default_rng(0)

    running: list[tuple[int, object]] = []
    lowest = 1.0
    for _ in range(1000):
        index = int(generator.integers(len(batches)))
        running.append((index, engine.step(batches[index])))
        if len(running) == 2:
            first, lazy = running.pop(0)
            rows = lazy.numpy().rows.view(np.float32)  # type: ignore[attr-defined]  # a LazyTensor
            lowest = min(lowest, lowest_cosine(rows, expected[first]))
    running[0][1].numpy()  # type: ignore[attr-defined]  # a LazyTensor, which has to be read

    assert lowest >= 0.9995


def test_two_steps_in_flight_keep_their_own_rows(engine: Engine) -> None:
    first, second = random_batch([20] * 3, seed=1), random_batch([20] * 3, seed=2)
    alone = [embed(engine, first), embed(engine, second)]

    together = [engine.step(first), engine.step(second)]

    rows = [lazy.numpy().rows.view(np.float32) for lazy in together]
    assert lowest_cosine(rows[0], alone[0]) >= 0.9999
    assert lowest_cosine(rows[1], alone[1]) >= 0.9999


def test_a_sequence_alone_and_in_company_has_nearly_the_same_row(engine: Engine) -> None:
    lengths = [3, 200, 1, 40]
    batch = random_batch(lengths, seed=5)
    offsets = np.cumsum([0, *lengths])
    alone = np.concatenate(
        [
            embed(engine, make_batch([batch.token_ids[a:b].tolist()], width=HIDDEN, normalize=[1]))
            for a, b in itertools.pairwise(offsets)
        ]
    )

    assert lowest_cosine(embed(engine, batch), alone) >= 0.999


def test_a_batch_that_does_not_fit_into_memory_runs_in_halves(engine: Engine) -> None:
    batch = random_batch([2048] * 16, seed=7)  # more than any graph; queries, keys and values alone are 67 MB
    expected = embed(engine, batch)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    before = engine._metrics.memory_splits._value.get()  # type: ignore[attr-defined]  # the library's own
    torch.cuda.set_per_process_memory_fraction((reserved + 32 * 2**20) / total)
    try:
        rows = embed(engine, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert engine._metrics.memory_splits._value.get() > before  # type: ignore[attr-defined]  # the library's own
    assert lowest_cosine(rows, expected) >= 0.9995


def test_two_engines_on_one_thread_keep_to_their_own_streams(engine: Engine, tmp_path: Path) -> None:
    batch = random_batch([2048] * 9, seed=8)
    expected = embed(engine, batch)
    make_engine(write_wide_qwen3(tmp_path / "model"), device="cuda", cache_dir=str(tmp_path / "cache"))

    np.testing.assert_array_equal(embed(engine, batch), expected)


class Blind(Attention):
    """Attention that sees nothing."""

    name = "blind"

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: RaggedBatch, mask: Mask
    ) -> torch.Tensor:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)


class BlindRunner:
    """A runner whose one backend is wrong."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.reference = runner.reference
        self.run_with = runner.run_with
        self.ways = runner.ways

    def backends(self) -> list[Blind]:
        return [Blind()]


def test_a_backend_that_computes_something_else_is_refused(engine: Engine) -> None:
    runner = BlindRunner(runner_of(engine))

    with pytest.raises(ModelError, match=r"self-check failed: attention blind \(eager\) has a cosine of"):
        verify(runner, engine.hello())  # type: ignore[arg-type]  # a runner with another backend


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bert_stays_close_to_the_reference(tmp_path: Path, dtype: str) -> None:
    config = bert_config(hidden_size=128, num_attention_heads=4, intermediate_size=256)
    folder = write_bert(tmp_path / "model", config=config, tensors=bert_tensors(config))
    engine = make_engine(folder, device="cuda", dtype=dtype, cache_dir=str(tmp_path / "cache"))
    sequences = [[7] * 5, list(range(48)), [1]]

    rows = embed(engine, make_batch(sequences, width=128, normalize=[1, 1, 1]))

    expected = unit(np.stack([BertReference(folder).embed(sequence) for sequence in sequences]))
    assert (rows * expected).sum(axis=1).min() > (0.999999 if dtype == "float32" else 0.999)
