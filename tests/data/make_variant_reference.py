"""Write what sentence-transformers makes of each edited copy of a model folder (`tests/variants.py`).

    PYTHONPATH=. python tests/data/make_variant_reference.py --model MODEL_FOLDER --out tests/data

Float32 on a CPU, one text at a time, as in `make_stsb_reference.py`. Needs numpy, torch and sentence-transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from tests.variants import TEXTS, VARIANTS, write_variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, np.ndarray] = {}
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            write_variant(arguments.model, Path(folder), name)
            model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
            rows[name] = np.stack([model.encode(text, show_progress_bar=False) for text in TEXTS])
    np.savez_compressed(arguments.out / "variant_reference.npz", **rows)
    print({name: value.shape for name, value in rows.items()})


if __name__ == "__main__":
    main()
