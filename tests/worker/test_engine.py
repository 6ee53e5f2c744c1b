"""The engine: one answer a sequence whatever its company, what a batch may ask, and the real model's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.model_location import find_model
from common.text.tokenization import Tokenizer, TruncationRule
from common.wire.messages import Batch
from tests.models import bert_config, bert_tensors, make_batch, random_sequences, write_bert, write_json, write_pplx
from tests.reference import BertReference, Qwen3Reference, unit
from tests.worker.conftest import make_engine
from worker.batch.lazy import LazyTensor
from worker.batch.ragged import BadBatch
from worker.checkpoint.files import ModelError
from worker.engine.engine import Engine
from worker.engine.oom_split import SequenceTooLarge, part_of
from worker.engine.runner import Runner

DATA = Path(__file__).parent.parent / "data"


def embed(engine: Engine, batch: Batch) -> npt.NDArray[np.float32]:
    """The rows of a batch of float32 alone: [sequences, dimensions]."""
    return engine.step(batch).numpy().rows.view(np.float32)


def test_rows_come_in_the_order_of_the_batch(tiny_engine: Engine, tiny_folder: Path) -> None:
    sequences = random_sequences([30, 1, 5, 48, 5, 2, 30])

    rows = embed(tiny_engine, make_batch(sequences))

    reference = BertReference(tiny_folder)
    np.testing.assert_allclose(rows, np.stack([reference.embed(s) for s in sequences]), atol=1e-5)


def test_a_sequence_alone_and_in_company_has_the_same_row(tiny_engine: Engine) -> None:
    generator = np.random.default_rng(0)
    sequences = random_sequences(generator.integers(1, 49, 24).tolist())
    alone = np.concatenate([embed(tiny_engine, make_batch([sequence])) for sequence in sequences])

    together = embed(tiny_engine, make_batch(sequences))
    order = generator.permutation(len(sequences))
    shuffled = embed(tiny_engine, make_batch([sequences[i] for i in order]))

    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(shuffled, alone[order], atol=1e-5)


def test_equal_sequences_have_equal_rows(tiny_engine: Engine) -> None:
    rows = embed(tiny_engine, make_batch([[7, 8, 9]] * 3 + [[1]]))

    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])


def test_the_order_of_tokens_matters(tiny_engine: Engine) -> None:
    rows = embed(tiny_engine, make_batch([[7, 8, 9], [9, 8, 7]]))

    assert np.abs(rows[0] - rows[1]).max() > 0.01


def test_each_sequence_has_its_own_dimensions_and_normalisation(tiny_engine: Engine, tiny_folder: Path) -> None:
    sequences = random_sequences([9, 3, 9, 1])
    batch = make_batch(sequences, dimensions=[32, 8, 8, 1], normalize=[1, 1, 0, 0])

    rows = embed(tiny_engine, batch)

    full = [BertReference(tiny_folder).embed(sequence) for sequence in sequences]
    np.testing.assert_allclose(rows[0], unit(full[0]), atol=1e-5)
    np.testing.assert_allclose(rows[1, :8], unit(full[1][:8]), atol=1e-5)
    np.testing.assert_allclose(rows[2, :8], full[2][:8], atol=1e-5)
    np.testing.assert_allclose(rows[3, :1], full[3][:1], atol=1e-5)
    assert not rows[1, 8:].any()
    assert not rows[2, 8:].any()
    assert not rows[3, 1:].any()


def test_each_span_of_a_sequence_has_a_row_of_its_own(tiny_engine: Engine) -> None:
    sequences = random_sequences([6, 3])
    each = [[(token, token + 1) for token in range(length)] for length in (6, 3)]
    tokens = embed(tiny_engine, make_batch(sequences, spans=each))

    rows = embed(tiny_engine, make_batch(sequences, spans=[[(0, 2), (3, 6)], [(0, 3)]]))

    expected = [tokens[0:2].mean(0), tokens[3:6].mean(0), tokens[6:9].mean(0)]
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rows[2], embed(tiny_engine, make_batch(sequences))[1], rtol=0, atol=1e-6)


def test_rows_are_bytes_and_contiguous(tiny_engine: Engine) -> None:
    rows = tiny_engine.step(make_batch([[1], [2]])).numpy().rows

    assert rows.dtype == np.uint8
    assert rows.shape == (2, 128)
    assert rows.flags.c_contiguous


def test_a_result_is_not_changed_by_the_next_step(tiny_engine: Engine) -> None:
    first = tiny_engine.step(make_batch([[1, 2]]))
    kept = first.numpy().rows.copy()

    embed(tiny_engine, make_batch([[3, 4]]))

    np.testing.assert_array_equal(first.numpy().rows, kept)


def test_a_batch_beyond_the_limits_is_refused_and_the_next_one_runs(tiny_engine: Engine) -> None:
    with pytest.raises(BadBatch):
        tiny_engine.step(make_batch([[64]]))

    assert np.isfinite(embed(tiny_engine, make_batch([[63]]))).all()


def test_a_token_whose_numbers_overflow_spoils_its_own_sequence_alone(tmp_path: Path) -> None:
    tensors = bert_tensors(bert_config())
    tensors["embeddings.word_embeddings.weight"][5] = 3e38
    engine = make_engine(write_bert(tmp_path, tensors=tensors))

    rows = embed(engine, make_batch([[1, 2], [1, 5], [3, 4], [5]], normalize=[1, 1, 0, 0]))

    assert np.isfinite(rows[[0, 2]]).all()
    assert np.isnan(rows[[1, 3]]).all()


def test_hello_tells_the_facts(tiny_engine: Engine, tiny_folder: Path) -> None:
    facts = tiny_engine.hello()

    assert facts.name == "tiny"
    assert facts.folder == str(tiny_folder)
    assert (facts.architecture, facts.device, facts.dtype) == ("BertModel", "cpu", "float32")
    assert (facts.dimensions, facts.max_tokens, facts.vocab_size) == (32, 48, 64)
    assert (facts.pooling, facts.normalize, facts.tasks) == ("mean", True, ["embed", "tokens"])
    assert facts.max_batch_tokens == 512
    assert len(facts.fingerprint) == 16


def test_the_operator_may_name_the_model_and_set_the_budget(tiny_folder: Path) -> None:
    facts = make_engine(tiny_folder, served_model_name="mine", max_batch_tokens="77").hello()

    assert (facts.name, facts.max_batch_tokens) == ("mine", 77)


def test_the_declared_length_limits_the_positions_and_never_exceeds_them(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 20})
    assert make_engine(folder).hello().max_tokens == 20
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 500})

    assert make_engine(folder).hello().max_tokens == 48


def test_two_starts_give_equal_bits(tiny_engine: Engine, tiny_folder: Path) -> None:
    batch = make_batch(random_sequences([3, 40]))
    again = make_engine(tiny_folder)

    np.testing.assert_array_equal(embed(again, batch), embed(tiny_engine, batch))
    assert again.hello() == tiny_engine.hello()


def test_bfloat16_stays_close_to_the_reference(tiny_folder: Path) -> None:
    sequences = random_sequences([5, 48, 1])
    engine = make_engine(tiny_folder, dtype="bfloat16")

    rows = embed(engine, make_batch(sequences, normalize=[1, 1, 1]))

    expected = unit(np.stack([BertReference(tiny_folder).embed(sequence) for sequence in sequences]))
    assert engine.hello().dtype == "bfloat16"
    assert (rows * expected).sum(axis=1).min() > 0.999


def test_a_dtype_that_the_device_does_not_have_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match="--dtype float16: on cpu use one of float32, bfloat16"):
        make_engine(tiny_folder, dtype="float16")


def test_attention_that_is_not_for_this_device_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match="attention triton: is for GPUs"):
        make_engine(tiny_folder, attention="triton")
    with pytest.raises(ModelError, match="there is no attention backend 'flash'; there are auto, triton"):
        make_engine(tiny_folder, attention="flash")


def test_the_fingerprint_depends_on_dtype_and_pooling(tmp_path: Path, tiny_folder: Path) -> None:
    other_pooling = make_engine(write_bert(tmp_path, pooling="pooling_mode_cls_token"))
    other_dtype = make_engine(tiny_folder, dtype="bfloat16")

    prints = {engine.hello().fingerprint for engine in (make_engine(tiny_folder), other_pooling, other_dtype)}

    assert len(prints) == 3


@pytest.fixture(scope="module")
def minilm() -> Engine:
    return make_engine(find_model("all-MiniLM-L6-v2").path)


@pytest.mark.slow
def test_minilm_equals_sentence_transformers_on_real_sentences(minilm: Engine) -> None:
    lines = (DATA / "stsb_reference.jsonl").read_text(encoding="utf-8").splitlines()
    expected = np.load(DATA / "stsb_reference.npy")
    sequences = Tokenizer(minilm.hello()).encode(
        [json.loads(line)["text"] for line in lines], TruncationRule(allowed=False)
    )
    rows = np.empty_like(expected)
    for places in np.array_split(np.random.default_rng(0).permutation(len(sequences)), 10):
        batch = make_batch([sequences[i].tolist() for i in places], width=384, normalize=[1] * len(places))
        rows[places] = embed(minilm, batch)

    assert len(expected) == 500
    np.testing.assert_allclose(rows, expected, atol=1e-5)


@pytest.mark.slow
def test_minilm_equals_the_plain_reference_at_its_longest(minilm: Engine) -> None:
    sequence = random_sequences([256], vocab_size=30_522)[0]

    rows = embed(minilm, make_batch([sequence, [101, 102]], width=384))

    reference = BertReference(Path(minilm.hello().folder))
    np.testing.assert_allclose(rows[0], reference.embed(sequence), atol=1e-5)
    np.testing.assert_allclose(rows[1], reference.embed([101, 102]), atol=1e-5)


def test_each_sequence_has_its_own_encoding(tmp_path: Path) -> None:
    engine = make_engine(write_pplx(tmp_path))
    sequences = random_sequences([9, 3, 9])

    rows = engine.step(make_batch(sequences, encodings=[0, 1, 2])).numpy().rows

    pooled = [Qwen3Reference(tmp_path, causal=False).embed(sequence, "mean") for sequence in sequences]
    np.testing.assert_allclose(rows[0].view(np.float32), pooled[0], atol=1e-5)
    expected = np.round(np.tanh(pooled[1]) * 127)
    assert np.abs(rows[1, :32].view(np.int8) - expected).max() <= 1  # where rounding is a tie but for the last bit
    np.testing.assert_array_equal(np.unpackbits(rows[2, :4], bitorder="little"), pooled[2] >= 0)


def test_only_the_bytes_that_a_batch_asks_for_come_back(tmp_path: Path) -> None:
    engine = make_engine(write_pplx(tmp_path))

    assert engine.step(make_batch([[1], [2]], encodings=[1, 2])).numpy().rows.shape == (2, 32)
    assert engine.step(make_batch([[1], [2]], encodings=[2, 2])).numpy().rows.shape == (2, 4)


class ShortOfMemory:
    """A runner that takes no more than some tokens at once."""

    def __init__(self, runner: Runner, max_tokens: int) -> None:
        self._runner = runner
        self._max_tokens = max_tokens
        self.released = 0
        self.ran: list[int] = []
        self.freed_tokens = 0

    def run(self, batch: Batch) -> LazyTensor:
        if len(batch.token_ids) > self._max_tokens + (self.freed_tokens if self.released else 0):
            raise torch.OutOfMemoryError("no memory")
        self.ran.append(len(batch.token_ids))
        return self._runner.run(batch)

    def release_memory(self) -> None:
        self.released += 1


def test_a_batch_that_does_not_fit_into_memory_runs_in_halves(tiny_folder: Path) -> None:
    engine = make_engine(tiny_folder)
    sequences = random_sequences([5, 1, 9, 2, 2, 2, 30, 1])
    whole = engine.step(make_batch(sequences)).numpy()
    runner = engine._runner = ShortOfMemory(engine._runner, max_tokens=30)  # type: ignore[assignment]

    rows = engine.step(make_batch(sequences)).numpy()

    np.testing.assert_allclose(rows.rows.view(np.float32), whole.rows.view(np.float32), atol=1e-6)
    assert runner.ran == [21, 30, 1]
    assert rows.pieces == (21, 30, 1)
    assert runner.released == 2  # for all of it, and for its second half


def test_halves_keep_spans_and_types_with_their_sequences() -> None:
    spans = [[(0, 1), (1, 3)], [(0, 1)], [(1, 2), (2, 3), (3, 4)]]
    batch = make_batch([[1, 2, 3], [4], [5, 6, 7, 8]], dimensions=[3, 1, 4], type_starts=[1, 1, 2], spans=spans)

    first, second = part_of(batch, 0, 2), part_of(batch, 2, 3)

    assert [half.token_ids.tolist() for half in (first, second)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [half.dimensions.tolist() for half in (first, second)] == [[3, 1], [4]]
    assert [half.type_starts.tolist() for half in (first, second)] == [[1, 1], [2]]
    assert [half.span_counts.tolist() for half in (first, second)] == [[2, 1], [3]]
    assert [half.spans.tolist() for half in (first, second)] == [[[0, 1], [1, 3], [0, 1]], [[1, 2], [2, 3], [3, 4]]]


def test_a_sequence_that_fits_once_graphs_have_given_way_runs(tiny_folder: Path) -> None:
    engine = make_engine(tiny_folder)
    runner = engine._runner = ShortOfMemory(engine._runner, max_tokens=30)  # type: ignore[assignment]
    runner.freed_tokens = 10

    rows = engine.step(make_batch(random_sequences([40]))).numpy()

    assert np.isfinite(rows.rows.view(np.float32)).all()
    assert runner.ran == [40]


def test_a_sequence_that_does_not_fit_into_memory_alone_fails(tiny_folder: Path) -> None:
    engine = make_engine(tiny_folder)
    engine._runner = ShortOfMemory(engine._runner, max_tokens=30)  # type: ignore[assignment]

    with pytest.raises(SequenceTooLarge) as raised:
        engine.step(make_batch(random_sequences([9, 9, 2, 31, 2])))

    assert (raised.value.sequence, raised.value.num_tokens) == (3, 31)


def test_a_cpu_without_memory_is_told_apart_from_a_batch_that_fails(tiny_folder: Path) -> None:
    engine = make_engine(tiny_folder)

    class Greedy(ShortOfMemory):
        def run(self, batch: Batch) -> LazyTensor:
            if len(batch.lengths) > 1:
                torch.empty(2**60)
            return super().run(batch)

    engine._runner = Greedy(engine._runner, max_tokens=30)  # type: ignore[assignment]

    assert engine.step(make_batch(random_sequences([4, 5]))).numpy().pieces == (4, 5)
