"""A family against transformers: its own class, tiny, with seeded random weights, saved and loaded as a checkpoint is.

Both compute in float32 on the CPU; transformers one sequence at a time with its plain ("eager") attention. Ours has to
give the same numbers alone, among others and in any order, at the lengths where implementations go wrong.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tests.models import edit_json, embed, random_sequences, tokenizer
from tests.worker.conftest import make_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from worker.engine.engine import Engine

VOCAB_SIZE = 96
_LENGTHS = (1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129)
_TOLERANCE = 1e-5
_LEAST_COSINE = 0.99999

Rows = npt.NDArray[np.float32]


def save(model: PreTrainedModel, folder: Path, **changes: object) -> Path:
    """A bare checkpoint of this model, with a tokenizer; `changes` replace or add fields of its config.json."""
    model.save_pretrained(folder)
    edit_json(folder / "config.json", **changes)
    tokenizer(VOCAB_SIZE - 3).save(str(folder / "tokenizer.json"))
    return folder


def seeded(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model ready to compare: parameters random and large enough that each of them shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                is_table = "embed" in name.lower() or "bias" in name
                parameter.copy_(noise if is_table else 1.2 * noise * parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.2 * noise)  # a norm's: around what its own class starts with
    return model.float().eval()


def sequences(limit: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Random token ids of every length that matters up to `limit`; ids 0 to 2 are left out, one of them may pad."""
    lengths = sorted({length for length in (*_LENGTHS, limit - 1, limit) if 1 <= length <= limit})
    return [[3 + token for token in sequence] for sequence in random_sequences(lengths, 5, vocab_size - 3)]


def reference_rows(model: PreTrainedModel, ids: list[list[int]]) -> Rows:
    """The mean of the last hidden states of each sequence."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([row])).last_hidden_state[0].mean(dim=0) for row in ids]
    return torch.stack(rows).numpy()


def rows_of(folder: Path, ids: list[list[int]]) -> Rows:
    """Our rows of one batch of these sequences, not normalised."""
    engine = make_engine(folder)
    return embed(engine, ids, width=engine.hello().dimensions)


def check(model: PreTrainedModel, folder: Path, limit: int, **changes: object) -> Engine:
    """Save the model, load it, and compare at all lengths up to the limit, which has to be ours too."""
    engine = make_engine(save(seeded(model), folder, **changes))
    ids = sequences(limit)

    assert engine.hello().max_tokens == limit
    check_rows(engine, ids, reference_rows(model, ids))
    return engine


def check_rows(engine: Engine, ids: list[list[int]], expected: Rows) -> None:
    """All at once, alone, and shuffled among others."""
    width = engine.hello().dimensions
    order = list(range(len(ids)))
    random.Random(3).shuffle(order)
    together = embed(engine, ids, width=width)
    alone = np.concatenate([embed(engine, [row], width=width) for row in ids])
    shuffled = np.empty_like(together)
    shuffled[order] = embed(engine, [ids[index] for index in order], width=width)
    for rows in (together, alone, shuffled):
        np.testing.assert_allclose(rows, expected, rtol=0, atol=_TOLERANCE)
        cosines = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() >= _LEAST_COSINE
