"""Write what sentence-transformers makes of each tiny checkpoint of the RoBERTa and DistilBERT families
(`tests/models.py`).

    PYTHONPATH=. python tests/data/make_encoder_reference.py --out tests/data

Float32 on a CPU, one text at a time, through transformers' own classes. Needs numpy, torch, sentence-transformers and
msgpack.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from tests.models import DISTILBERT_VARIANTS, ENCODER_TEXTS, MAX_POSITIONS, ROBERTA_VARIANTS, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, np.ndarray] = {}
    for name, write in (ROBERTA_VARIANTS | DISTILBERT_VARIANTS).items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = _vectors(write(Path(folder)), "<pad>" if name in ROBERTA_VARIANTS else "[UNK]")
    np.savez_compressed(arguments.out / "encoder_reference.npz", **rows)
    print({name: (value.shape, float(np.linalg.norm(value, axis=1).max())) for name, value in rows.items()})


def _vectors(folder: Path, pad_token: str) -> np.ndarray:
    # By model type transformers would take a class that rebuilds the tokenizer from a vocabulary it does not have, and
    # of RoBERTa's position table it would use rows that are not there.
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad_token, "model_max_length": MAX_POSITIONS},
    )
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    return np.stack([model.encode(text, show_progress_bar=False) for text in ENCODER_TEXTS])


if __name__ == "__main__":
    main()
