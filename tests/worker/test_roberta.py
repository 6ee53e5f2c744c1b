"""The RoBERTa family against transformers: positions after the padding's, names of checkpoints, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.text.tokenization import Tokenizer, TruncationRule
from tests.models import (
    ENCODER_TEXTS,
    MAX_POSITIONS,
    ROBERTA_VARIANTS,
    Tensors,
    bert_tensors,
    embed,
    make_batch,
    random_sequences,
    roberta_config,
    write_json,
    write_roberta,
)
from tests.worker.conftest import make_engine
from worker.attention.sdpa import SdpaAttention
from worker.batch.ragged import load_sorted
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.models.build import build
from worker.models.loader import load_weights
from worker.models.pooling import pool

REFERENCE = Path(__file__).parent.parent / "data" / "encoder_reference.npz"
SEQUENCES = random_sequences([1, 7, 48, 7, 2])
WORDS, QUERY = "embeddings.word_embeddings.weight", "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize("name", ROBERTA_VARIANTS)
def test_a_checkpoint_gives_the_vectors_that_transformers_gives(name: str, tmp_path: Path) -> None:
    engine = make_engine(ROBERTA_VARIANTS[name](tmp_path))
    facts = engine.hello()
    ids = [row.tolist() for row in Tokenizer(facts).encode(ENCODER_TEXTS, TruncationRule(allowed=True))]

    rows = embed(engine, ids, normalize=[int(facts.normalize)] * len(ids))

    assert [len(row) for row in ids] == [3, 7, 48, 7]
    with np.load(REFERENCE, allow_pickle=False) as reference:
        np.testing.assert_allclose(rows, reference[name], rtol=0, atol=1e-5)


def test_the_variants_differ_so_that_each_of_them_is_tested() -> None:
    with np.load(REFERENCE, allow_pickle=False) as reference:
        rows = {name: reference[name] for name in ROBERTA_VARIANTS}
    assert all(np.abs(rows[a] - rows[b]).max() > 0.1 for a in rows for b in rows if a < b)
    # Of the same words in another order.
    assert all(np.abs(values[1] - values[3]).max() > 0.01 for values in rows.values())


def test_a_sequence_alone_and_in_company_has_the_same_row(tmp_path: Path) -> None:
    engine = make_engine(write_roberta(tmp_path))
    generator = np.random.default_rng(0)
    sequences = random_sequences(generator.integers(1, 49, 12).tolist())
    order = generator.permutation(len(sequences))

    together = embed(engine, sequences)
    shuffled = embed(engine, [sequences[i] for i in order])

    alone = np.concatenate([embed(engine, [sequence]) for sequence in sequences])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(shuffled, alone[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding_id", [0, 1, 3])
def test_the_position_rows_for_padding_are_never_used(tmp_path: Path, padding_id: int) -> None:
    config = roberta_config(pad_token_id=padding_id, max_position_embeddings=MAX_POSITIONS + padding_id + 1)
    tensors = bert_tensors(config)
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other["embeddings.position_embeddings.weight"][: padding_id + 1] = 1e6

    engine, twin = (
        make_engine(write_roberta(tmp_path / name, config=config, tensors=of))
        for name, of in (("model", tensors), ("twin", other))
    )

    assert engine.hello().max_tokens == twin.hello().max_tokens == MAX_POSITIONS
    np.testing.assert_array_equal(embed(engine, SEQUENCES), embed(twin, SEQUENCES))


@pytest.mark.parametrize(
    ("declared", "tokenizer_limit", "expected"),
    [(None, None, 48), (None, 48, 48), (None, 50, 48), (50, 48, 48), (24, 48, 24), (None, 24, 24)],
)
def test_the_longest_sequence_leaves_out_the_rows_for_padding_whatever_is_declared(
    tmp_path: Path, declared: int | None, tokenizer_limit: int | None, expected: int
) -> None:
    folder = write_roberta(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": declared})
    write_json(folder / "tokenizer_config.json", {"model_max_length": tokenizer_limit})

    assert make_engine(folder).hello().max_tokens == expected


def test_names_with_the_prefix_and_parts_that_are_not_needed_give_the_same_rows(tmp_path: Path) -> None:
    config = roberta_config(architectures=["RobertaForMaskedLM"])
    tensors = {f"roberta.{name}": tensor for name, tensor in bert_tensors(config).items()}
    tensors["roberta.embeddings.position_ids"] = torch.arange(50).unsqueeze(0)
    tensors["roberta.pooler.dense.weight"] = torch.zeros(32, 32)
    tensors["lm_head.dense.weight"] = torch.zeros(32, 32)
    tensors["lm_head.bias"] = torch.zeros(64)
    bare, prefixed = write_roberta(tmp_path / "bare"), write_roberta(tmp_path / "lm", config=config, tensors=tensors)

    rows, expected = (embed(make_engine(folder), SEQUENCES) for folder in (prefixed, bare))

    np.testing.assert_array_equal(rows, expected)


def test_a_reference_batch_is_computed_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in bert_tensors(roberta_config()).items()}
    folder = write_roberta(tmp_path, tensors=tensors)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model.to(torch.bfloat16))
    ragged, restore = load_sorted(make_batch(SEQUENCES), SdpaAttention())

    hidden = model(dataclasses.replace(ragged, reference=True))

    assert hidden.dtype == torch.float32
    rows = pool(hidden, ragged.spans, "mean")[restore].numpy()
    np.testing.assert_allclose(rows, embed(make_engine(folder, dtype="float32"), SEQUENCES), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "xlm-roberta-xl"}, "config.json: model_type: 'xlm-roberta-xl' is not this architecture's"),
        ({"model_type": "bert"}, "config.json: model_type: 'bert'"),
        ({"architectures": ["XLMRobertaXLModel"]}, "architectures: XLMRobertaXLModel is not"),
        ({"architectures": ["RobertaForTokenClassification"]}, "architectures: RobertaForTokenClass.* is not"),
        ({"architectures": ["BertModel"]}, "config.json: model_type: 'roberta'"),
        ({"pad_token_id": None}, "config.json: pad_token_id: missing"),
        ({"pad_token_id": -1}, "config.json: pad_token_id: a whole number from 0 to 48 is needed, not -1"),
        ({"pad_token_id": True}, "config.json: pad_token_id: a whole number"),
        ({"pad_token_id": 49}, "config.json: pad_token_id: a whole number"),
        ({"hidden_act": "mish"}, "config.json: hidden_act: 'mish' is not supported"),
        ({"position_embedding_type": "relative_key"}, "config.json: position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "config.json: is_decoder: only encoders"),
        ({"add_cross_attention": True}, "config.json: add_cross_attention: only encoders"),
        ({"num_attention_heads": 5}, "config.json: num_attention_heads: 5 does not divide hidden_size 32"),
        ({"type_vocab_size": 0}, "config.json: type_vocab_size"),
        ({"layer_norm_eps": None}, "config.json: layer_norm_eps"),
    ],
)
def test_a_configuration_that_is_not_implemented_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_roberta(tmp_path, config=roberta_config(**changes), tensors=bert_tensors(roberta_config()))

    with pytest.raises(ModelError, match=message):
        make_engine(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(QUERY), rf"Missing tensors: {QUERY}\. Unexpected tensors: none"),
        (lambda tensors: tensors.update({"adapter.weight": torch.zeros(1)}), "Unexpected tensors: adapter.weight"),
        (lambda tensors: tensors.update({f"roberta.{WORDS}": tensors[WORDS].clone()}), f"{WORDS} is there twice"),
        (
            lambda tensors: tensors.update({"embeddings.position_embeddings.weight": torch.zeros(48, 32)}),
            r"position_embeddings.weight: shape \[48, 32\], but the model needs \[50, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Tensors], None], message: str) -> None:
    tensors = bert_tensors(roberta_config())
    change(tensors)
    folder = write_roberta(tmp_path, tensors=tensors)

    with pytest.raises(ModelError, match=message):
        make_engine(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_fused_embeddings_begin_after_the_rows_for_padding(tmp_path: Path) -> None:
    folder = write_roberta(tmp_path)
    checkpoint = Checkpoint.read(folder)
    model = build(checkpoint.architecture, checkpoint.config)
    assert isinstance(model, torch.nn.Module)
    load_weights(folder, model)
    ragged, _ = load_sorted(make_batch(SEQUENCES), SdpaAttention())
    expected = model.embeddings(ragged)

    fused = model.to("cuda", torch.bfloat16).embeddings(
        dataclasses.replace(ragged, token_ids=ragged.token_ids.cuda(), positions=ragged.positions.cuda())
    )

    torch.testing.assert_close(fused.float().cpu(), expected, rtol=0.02, atol=0.02)
