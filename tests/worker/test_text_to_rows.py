"""From texts to rows, tokenizer and engine together, where other servers went wrong between the two.

What each is compared with reads the same folder on its own: transformers, sentence-transformers, or a forward pass in
float64.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.errors import InvalidRequest
from common.text.chunks import ChunkTokenizer
from common.text.pairs import pair_tokenizer
from common.text.tokenization import Tokenizer, TruncationRule
from common.wire.rows import BINARY, FLOAT32, INT8
from tests import parity
from tests.common.test_pairs import QWEN, QWEN_INSTRUCTION, byte_level
from tests.models import (
    embed,
    make_batch,
    pplx_config,
    qwen3_tensors,
    random_sequences,
    roberta_tokenizer,
    write_pplx,
)
from tests.reference import Qwen3Reference
from tests.worker.conftest import make_engine
from worker.batch.ragged import BadBatch
from worker.engine.engine import Engine

pytestmark = pytest.mark.slow

CUT = TruncationRule(allowed=True)
REFUSE = TruncationRule(allowed=False)
NUM_BYTE_LEVEL_TOKENS = 512  # rows for all ids of `byte_level()`
CONTEXT_CODE = {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3ContextualModel"}

Rows = npt.NDArray[np.float32]


# --- positions that begin after the padding token's ---

NUM_POSITION_ROWS = 514
NUM_WORDS = 60


@pytest.fixture(scope="module")
def xlm_roberta(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """514 rows of positions, of which a text has 512."""
    config = transformers.XLMRobertaConfig(
        vocab_size=NUM_WORDS + 4,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=NUM_POSITION_ROWS,
        type_vocab_size=1,
        pad_token_id=1,
    )
    model = parity.seeded(transformers.XLMRobertaModel(config))
    folder = parity.save(model, tmp_path_factory.mktemp("models") / "xlm-roberta")
    roberta_tokenizer().save(str(folder / "tokenizer.json"))
    return folder, model


def text_of(num_tokens: int, seed: int = 0) -> str:
    """A text of so many tokens, the two around it included."""
    generator = random.Random(f"{num_tokens} {seed}")
    return " ".join(f"w{generator.randrange(NUM_WORDS)}" for _ in range(num_tokens - 2))


@pytest.mark.parametrize("num_tokens", [3, 511, 512, 513, 514, 5000])
def test_a_roberta_takes_as_many_tokens_as_have_positions_and_cuts_or_refuses_more(
    num_tokens: int, xlm_roberta: tuple[Path, PreTrainedModel]
) -> None:
    folder, model = xlm_roberta
    engine = make_engine(folder)
    tokenizer = Tokenizer(engine.hello())
    text = text_of(num_tokens)

    [ids] = tokenizer.encode([text], CUT)

    whole = RustTokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(whole) == num_tokens
    assert ids.tolist() == (whole if num_tokens <= 512 else [*whole[:511], whole[-1]])
    expected = parity.reference_rows(model, [ids.tolist()])
    np.testing.assert_allclose(embed(engine, [ids.tolist()], width=64), expected, rtol=0, atol=1e-5)
    if num_tokens <= 512:
        assert tokenizer.encode([text], REFUSE)[0].tolist() == whole
    else:
        with pytest.raises(InvalidRequest, match=r"has \d+ (tokens; this model takes at most 512|characters; at most)"):
            tokenizer.encode([text], REFUSE)
        with pytest.raises(BadBatch):
            engine.step(make_batch([whole], width=64))
        np.testing.assert_allclose(embed(engine, [ids.tolist()], width=64), expected, rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_ten_thousand_short_requests_leave_the_vector_of_the_next_one_as_it_was(
    xlm_roberta: tuple[Path, PreTrainedModel],
) -> None:
    folder, model = xlm_roberta
    engine = make_engine(folder)
    generator = np.random.default_rng(3)
    probe = [0, 9, 40, 17, 5, 2]
    longest = [0, *generator.integers(4, 64, 510).tolist(), 2]
    lengths = generator.integers(1, 17, 9_999).tolist()
    short = [[4 + token for token in row] for row in random_sequences(lengths, 1, NUM_WORDS)]
    size = 16

    probes = [embed(engine, [probe], width=64)]
    for start in range(0, len(short), size):
        rows = embed(engine, short[start : start + size], width=64)
        assert np.isfinite(rows).all()
        if start < 5_000 <= start + size or start + size >= len(short):
            probes += [embed(engine, [probe], width=64), embed(engine, [*short[:9], probe], width=64)[-1:]]

    assert len(probes) == 5
    for row in probes[1:]:
        np.testing.assert_allclose(row, probes[0], rtol=0, atol=1e-6)
    # An offset that had grown would have no row for the longest text.
    expected = parity.reference_rows(model, [probe, longest])
    np.testing.assert_allclose(embed(engine, [probe, longest], width=64), expected, rtol=0, atol=1e-5)


# --- long limits ---


@pytest.mark.parametrize("family", ["Qwen3", "ModernBert"])
def test_texts_that_differ_after_600_tokens_have_different_vectors(family: str, tmp_path: Path) -> None:
    fields: dict[str, object] = {
        "vocab_size": NUM_WORDS + 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "pad_token_id": 1,
    }
    if family == "Qwen3":
        fields |= {"num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{family}Config")(**fields)
    model = parity.seeded(getattr(transformers, f"{family}Model")(config))
    folder = parity.save(model, tmp_path)
    roberta_tokenizer().save(str(folder / "tokenizer.json"))
    engine = make_engine(folder)
    same = text_of(602)

    ids = [row.tolist() for row in Tokenizer(engine.hello()).encode([f"{same} w3 w4", f"{same} w5 w6"], REFUSE)]

    assert engine.hello().max_tokens == 2048
    assert [len(row) for row in ids] == [604, 604]  # what is run is what is counted: nothing was cut
    rows = embed(engine, ids)
    np.testing.assert_allclose(rows, parity.reference_rows(model, ids), rtol=0, atol=1e-5)
    assert np.abs(rows[0] - rows[1]).max() > 1e-4


# --- the end token of last-token pooling ---


def save_byte_level(words: RustTokenizer, folder: Path) -> None:
    """For transformers; `<|endoftext|>` is what pads, and not what ends, as in Qwen3-Embedding."""
    options = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "model_max_length": 256}
    FastTokenizer(tokenizer_object=words, **options).save_pretrained(folder)


@pytest.fixture(scope="module")
def last_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-Embedding: its tokenizer's post-processor adds a token that is not the configured end."""
    folder = tmp_path_factory.mktemp("last-token")
    config = transformers.Qwen3Config(
        vocab_size=NUM_BYTE_LEVEL_TOKENS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=byte_level("end").token_to_id("<|im_end|>"),
    )
    parity.seeded(transformers.Qwen3Model(config)).save_pretrained(folder / "bare")
    save_byte_level(byte_level("end"), folder / "bare")
    modules = [Transformer(str(folder / "bare")), Pooling(64, "lasttoken"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "saved"), create_model_card=False)
    return folder / "saved"


@pytest.mark.parametrize(
    "text",
    ["fox", "the quick brown fox", "the fox<|endoftext|>", "<|endoftext|>", "the fox <|im_end|>", "the fox " * 400],
    ids=["word", "words", "spells-it", "is-it", "spells-the-end", "is-cut"],
)
def test_the_token_that_the_tokenizer_ends_a_text_with_is_there_once_and_pooled(text: str, last_token: Path) -> None:
    engine = make_engine(last_token)

    [ids] = Tokenizer(engine.hello()).encode([text], CUT)

    library = AutoTokenizer.from_pretrained(last_token)
    assert ids.tolist() == library(text, truncation=True, max_length=256)["input_ids"]
    end = library.convert_tokens_to_ids("<|endoftext|>")
    assert ids.tolist().count(end) == text.count("<|endoftext|>") + 1
    row = embed(engine, [ids.tolist()], width=64, normalize=[1])
    # Beside a longer text: what pads in the library must not be what is pooled.
    expected = SentenceTransformer(str(last_token), device="cpu").encode([text, "lazy " * 90], batch_size=2)[:1]
    np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5)


def test_without_its_end_token_a_text_would_have_another_vector(last_token: Path) -> None:
    engine = make_engine(last_token)
    [ids] = Tokenizer(engine.hello()).encode(["the quick brown fox"], REFUSE)

    whole, without = embed(engine, [ids.tolist(), ids.tolist()[:-1]], width=64, normalize=[1, 1])

    assert whole @ without < 0.9


# --- a reranker that answers ---


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    words = byte_level()
    config = transformers.Qwen3Config(
        vocab_size=NUM_BYTE_LEVEL_TOKENS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=words.token_to_id("<|im_end|>"),
        tie_word_embeddings=True,
    )
    model = parity.seeded(transformers.Qwen3ForCausalLM(config))
    with torch.no_grad():  # so that no score is next to 0 or 1
        model.lm_head.weight[[words.token_to_id("yes"), words.token_to_id("no")]] *= 0.1
    folder = tmp_path_factory.mktemp("models") / "reranker"
    model.save_pretrained(folder)
    save_byte_level(words, folder)
    return folder, model


def our_scores(engine: Engine, query: str, documents: list[str], instruction: str | None) -> Rows:
    """As a gateway asks for them: probabilities of yes."""
    facts = engine.hello()
    pairs = pair_tokenizer(facts, Tokenizer(facts)).encode(query, documents, REFUSE, instruction=instruction)
    logits = embed(engine, [pair.ids.tolist() for pair in pairs], width=1)[:, 0]
    assert facts.score_activation == "sigmoid"
    return 1 / (1 + np.exp(-logits))


def library_scores(folder: Path, model: PreTrainedModel, query: str, documents: list[str], instruction: str) -> Rows:
    """The published way: the pair between a beginning and an end, the last token's logits of yes and no alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    beginning, rest = QWEN.split("<Instruct>")
    middle, end = rest.split("<|im_end|>", 1)
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (beginning, f"<|im_end|>{end}"))
    answers = [tokenizer.convert_tokens_to_ids(answer) for answer in ("no", "yes")]
    scores = []
    for document in documents:
        pair = f"<Instruct>{middle}".format(instruction=instruction, query=query, document=document)
        ids = [*before, *tokenizer(pair)["input_ids"], *after]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1, answers]
        scores.append(torch.log_softmax(logits, dim=0)[1].exp().item())
    return np.array(scores, dtype=np.float32)


def test_scores_of_a_qwen3_reranker_are_those_of_the_published_prompt(reranker: tuple[Path, PreTrainedModel]) -> None:
    folder, model = reranker
    engine = make_engine(folder, task="score")
    generator = random.Random(7)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "naïve", "日本", "", "\n"]
    documents = [" ".join(generator.choices(words, k=generator.randrange(1, 30))) for _ in range(20)]

    scores = our_scores(engine, "what is quick?", documents, None)

    expected = library_scores(folder, model, "what is quick?", documents, QWEN_INSTRUCTION)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert np.argsort(scores).tolist() == np.argsort(expected).tolist()
    assert np.ptp(expected) > 0.05


@pytest.mark.parametrize("instruction", ["Find dogs that jump", ""])
def test_an_instruction_changes_the_scores_as_in_the_published_prompt(
    instruction: str, reranker: tuple[Path, PreTrainedModel]
) -> None:
    folder, model = reranker
    engine = make_engine(folder, task="score")
    documents = ["the quick brown fox", "a dog", "jumps over"]

    scores = our_scores(engine, "what is quick?", documents, instruction)

    expected = library_scores(folder, model, "what is quick?", documents, instruction)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert np.abs(scores - our_scores(engine, "what is quick?", documents, None)).min() > 1e-3


# --- late chunks ---


@pytest.fixture(scope="module")
def context_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = pplx_config(auto_map=CONTEXT_CODE, vocab_size=NUM_BYTE_LEVEL_TOKENS, max_position_embeddings=256)
    folder = write_pplx(tmp_path_factory.mktemp("models") / "context", config=config, tensors=qwen3_tensors(config))
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def test_a_chunk_that_spells_the_separator_is_one_chunk_of_plain_text(context_model: Path) -> None:
    engine = make_engine(context_model)
    facts = engine.hello()
    chunks = ["the quick <|endoftext|> fox", "<|endoftext|>", "lazy dogs"]

    document = ChunkTokenizer(facts, Tokenizer(facts)).encode(chunks, "input[0]")

    assert document.ids.tolist().count(facts.separator_id) == 2
    assert len(document.spans) == 3
    plain = byte_level()
    plain.encode_special_tokens = True
    parts = [plain.encode(chunk).ids for chunk in chunks]
    assert not any(facts.separator_id in part for part in parts)
    ids = [*parts[0], facts.separator_id, *parts[1], facts.separator_id, *parts[2]]
    hidden = Qwen3Reference(context_model, causal=False).hidden_states(ids)
    starts = np.cumsum([0] + [len(part) + 1 for part in parts[:-1]]).tolist()
    expected = torch.stack(
        [hidden[start : start + len(part)].mean(dim=0) for start, part in zip(starts, parts, strict=True)]
    )
    spans = [[tuple(side) for side in document.spans.tolist()]]
    rows = embed(engine, [document.ids.tolist()], spans=spans)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)


# --- int8 and bits ---


class Float64Reference(Qwen3Reference):
    """The same forward pass, every number of it in float64."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, causal=False)
        self._tensors = {name: tensor.double() for name, tensor in self._tensors.items()}


@pytest.fixture(scope="module")
def quantising(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, list[list[int]], npt.NDArray[np.float64]]:
    """A pplx-embed, sequences, and their pooled rows in float64."""
    folder = write_pplx(tmp_path_factory.mktemp("models") / "pplx")
    ids = random_sequences([1, 2, 7, 8, 9, 31, 32, 33, 47, 48, 3, 5], seed=8)
    reference = Float64Reference(folder)
    rows = torch.stack([reference.hidden_states(row).mean(dim=0) for row in ids]).numpy()
    assert rows.dtype == np.float64
    return make_engine(folder), ids, rows


def test_int8_codes_are_within_one_of_those_computed_in_float64(
    quantising: tuple[Engine, list[list[int]], npt.NDArray[np.float64]],
) -> None:
    engine, ids, rows = quantising

    together = engine.step(make_batch(ids, encodings=[INT8] * len(ids))).numpy().rows[:, :32].view(np.int8)

    expected = np.round(np.tanh(rows) * 127)
    differences = np.abs(together.astype(np.int64) - expected)
    assert differences.max() <= 1
    assert (differences == 0).mean() > 0.99
    assert len(np.unique(expected)) > 100  # from nearly all of the codes
    alone = [engine.step(make_batch([row], encodings=[INT8])).numpy().rows[0, :32].view(np.int8) for row in ids]
    assert np.abs(np.stack(alone) - expected).max() <= 1


def test_bits_are_the_signs_computed_in_float64(
    quantising: tuple[Engine, list[list[int]], npt.NDArray[np.float64]],
) -> None:
    engine, ids, rows = quantising

    packed = engine.step(make_batch(ids, encodings=[BINARY] * len(ids))).numpy().rows[:, :4]

    bits = np.unpackbits(packed, axis=1, bitorder="little").astype(bool)
    is_clear = np.abs(rows) > 1e-4
    np.testing.assert_array_equal(bits[is_clear], (rows >= 0)[is_clear])
    assert is_clear.mean() > 0.99
    assert 0.3 < bits.mean() < 0.7


def test_encodings_of_one_batch_are_all_of_the_row_before_any_normalisation(
    quantising: tuple[Engine, list[list[int]], npt.NDArray[np.float64]],
) -> None:
    engine, ids, rows = quantising
    same = [ids[5]] * 4

    batch = make_batch(same, encodings=[FLOAT32, INT8, BINARY, INT8], normalize=[1, 0, 0, 1])
    floats, codes, bits, normalised = engine.step(batch).numpy().rows

    unit = rows[5] / np.linalg.norm(rows[5])
    np.testing.assert_allclose(floats.view(np.float32), unit, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(codes, normalised)
    assert np.abs(codes[:32].view(np.int8) - np.round(np.tanh(rows[5]) * 127)).max() <= 1
    assert np.array_equal(np.unpackbits(bits[:4], bitorder="little") == 1, rows[5] >= 0)
