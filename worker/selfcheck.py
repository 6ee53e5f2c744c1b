"""Golden vectors before the first request: what runs fast against the same model in float32, on real text.

A kernel that is wrong on this card, with this driver or in this head shape answers numbers that look like vectors. So
before a worker says Hello, every attention backend that it will use embeds real sentences, eagerly and by a captured
graph, and is compared with the same weights in plain float32. A cosine below 0.999 refuses to serve.

The bound: Perplexity's description of its engine states 0.1 % as the divergence that bfloat16 is allowed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from common.protocol import FLOAT32, Batch
from common.tokenization import Tokenizer, TruncationRule
from worker.files import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.protocol import ModelFacts
    from worker.runner import DeviceRunner

logger = logging.getLogger(__name__)

_LEAST_COSINE = 0.999

# Sentences in several languages and scripts, questions, code, numbers: what people search with.
_TEXTS = (
    "a",
    "how do I reset a forgotten password",
    "A plane is taking off from the runway.",
    "Three men are playing chess in the park while a dog sleeps under the table.",
    "The committee approved the budget for 2027 after four hours of debate; only two members voted against it.",
    "Der Zug nach Hamburg fährt heute von Gleis 7 ab und hat etwa zehn Minuten Verspätung.",
    "¿Dónde puedo comprar un billete de autobús para mañana por la mañana?",
    "Le chat dort sur le canapé pendant que la pluie tombe sur les toits de la ville.",
    "这家餐厅的面条很好吃,但是周末要等很久。",
    "明日の会議は午後三時から始まります。資料を忘れないでください。",
    "Каждое утро она читает газету и пьёт чёрный кофе без сахара.",
    "def add(a: int, b: int) -> int: return a + b",
    "Chlorophyll absorbs light mostly in the blue and red parts of the spectrum, which is why leaves look green.",
    "What is the boiling point of water at an altitude of 3,000 metres?",
)
_DOCUMENT_TOKENS = 300
_LONG_TOKENS = 2048


def verify(runner: DeviceRunner, facts: ModelFacts) -> float:
    """The lowest cosine that any of the backends has to the reference.

    Raises:
        ModelError: it is below 0.999, or not a number.
    """
    lowest = 1.0
    for batch in _batches(facts):
        expected = _comparable(runner.reference(batch), facts)
        for backend in runner.backends():
            for way in runner.ways:
                rows = runner.run_with(batch, backend, way).numpy().rows.view(np.float32)
                cosine = float(_cosines(_comparable(rows, facts), expected).min())
                lowest = min(lowest, cosine)
                if not cosine >= _LEAST_COSINE:
                    raise ModelError(
                        f"self-check failed: attention {backend.name} ({way}) has a cosine of {cosine:.6f} to the "
                        f"float32 reference, at least {_LEAST_COSINE} is needed. "
                        "Choose another --attention, or --dtype float32."
                    )
    return lowest


def _comparable(rows: npt.NDArray[np.float32], facts: ModelFacts) -> npt.NDArray[np.float32]:
    """A score is one number, which has no direction, and a sparse row may have no values, or nearly none: those of a
    batch are compared as one row."""
    return rows.reshape(1, -1) if {"score", "sparse"}.intersection(facts.tasks) else rows


def _batches(facts: ModelFacts) -> list[Batch]:
    """Short texts, documents, and one long text, as far as the model takes them."""
    short = Tokenizer(facts).encode(list(_TEXTS), TruncationRule(allowed=True))
    words = np.concatenate(short)
    long = np.resize(words, min(_LONG_TOKENS, facts.max_tokens))
    document = min(_DOCUMENT_TOKENS, facts.max_tokens)
    documents = [np.roll(words, 17 * shift) for shift in range(4)]
    documents = [np.resize(ids, document - shift) for shift, ids in enumerate(documents) if document > shift]
    batches = [[*short, short[0][:1]], documents, [long]]
    if "score" in facts.tasks:
        batches = [[sequence for batch in batches for sequence in batch]]  # of one score nothing could be told
    return [_batch(batch, facts) for batch in batches]


def _batch(sequences: list[npt.NDArray[np.int32]], facts: ModelFacts) -> Batch:
    return Batch(
        epoch=0,
        batch_id=0,
        token_ids=np.concatenate(sequences).astype(np.int32),
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        dimensions=np.full(len(sequences), facts.dimensions, dtype=np.int32),
        normalize=np.full(len(sequences), "score" not in facts.tasks, dtype=np.uint8),
        encodings=np.full(len(sequences), FLOAT32, dtype=np.uint8),
    )


def _cosines(rows: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    a, b = rows.astype(np.float64), expected.astype(np.float64)
    cosines: npt.NDArray[np.float64] = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return cosines
