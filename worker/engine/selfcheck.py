"""Golden vectors before the first request: the fast kernels against the same model in float32, on real text.

A kernel that is wrong on this card, with this driver or in this head shape returns numbers that look like vectors. So
before a worker says Hello, it embeds real sentences with every attention backend that it will use, eagerly and by a
captured graph. It compares them with the same weights in plain float32, and refuses to serve if a cosine is below
0.999.

The bound: Perplexity's description of its engine states 0.1 % as the divergence that bfloat16 is allowed.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from common.text.tokenization import Tokenizer, TruncationRule
from common.wire.messages import Batch
from common.wire.rows import FLOAT32
from worker.checkpoint.files import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from common.wire.messages import ModelFacts
    from worker.engine.runner import DeviceRunner

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
    """The lowest cosine of any backend to the reference.

    The direction of scores and of sparse rows says little. For such models the caller passes a runner that pools hidden
    states.

    Raises:
        ModelError: it is below 0.999, or not a number.
    """
    lowest = 1.0
    for batch in _batches(facts):
        expected = runner.reference(batch)
        for backend in runner.backends():
            for way in runner.ways:
                rows = runner.run_with(batch, backend, way).numpy().rows.view(np.float32)
                cosine = float(_cosines(rows, expected).min())
                lowest = min(lowest, cosine)
                if not cosine >= _LEAST_COSINE:
                    raise ModelError(
                        f"self-check failed: attention {backend.name} ({way}) has a cosine of {cosine:.6f} to the "
                        f"float32 reference, at least {_LEAST_COSINE} is needed. "
                        "Choose another --attention, or --dtype float32."
                    )
    return lowest


def _batches(facts: ModelFacts) -> list[Batch]:
    """Short texts, documents, the same documents in two spans of two types each, and one long text.

    All are cut to what the model takes.
    """
    short = Tokenizer(facts).encode(list(_TEXTS), TruncationRule(allowed=True))
    words = np.concatenate(short)
    long = np.resize(words, min(_LONG_TOKENS, facts.max_tokens))
    document = min(_DOCUMENT_TOKENS, facts.max_tokens)
    documents = [np.roll(words, 17 * shift) for shift in range(4)]
    documents = [np.resize(ids, document - shift) for shift, ids in enumerate(documents) if document > shift]
    halves = _batch(documents, facts)
    middles = (halves.lengths + 1) // 2
    sides = np.stack((np.zeros_like(middles), middles, middles, halves.lengths), axis=1)
    if middles[-1] < halves.lengths[-1]:
        halves = replace(
            halves,
            type_starts=middles if facts.has_token_types else halves.type_starts,
            span_counts=np.full(len(documents), 2, dtype=np.int32),
            spans=sides.reshape(-1, 2),
        )
    return [_batch([*short, short[0][:1]], facts), _batch(documents, facts), halves, _batch([long], facts)]


def _batch(sequences: list[npt.NDArray[np.int32]], facts: ModelFacts) -> Batch:
    return Batch(
        epoch=0,
        batch_id=0,
        token_ids=np.concatenate(sequences).astype(np.int32),
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        dimensions=np.full(len(sequences), facts.dimensions, dtype=np.int32),
        normalize=np.ones(len(sequences), dtype=np.uint8),
        encodings=np.full(len(sequences), FLOAT32, dtype=np.uint8),
    )


def _cosines(rows: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    a, b = rows.astype(np.float64), expected.astype(np.float64)
    cosines: npt.NDArray[np.float64] = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return cosines
