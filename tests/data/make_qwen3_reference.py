"""Write what sentence-transformers makes of each tiny checkpoint of the Qwen3 family (`tests/variants.py`).

    PYTHONPATH=. python tests/data/make_qwen3_reference.py --out tests/data

Float32 on a CPU, one text at a time. Where a checkpoint brings code of its own (pplx-embed), none of it is run: its
vectors are the mean over transformers' own Qwen3Model, given the same weights and a mask in which every token is
visible. Needs numpy, torch, sentence-transformers and msgpack.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3Model

from tests.variants import BIDIRECTIONAL, QWEN3_TEXTS, QWEN3_VARIANTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, np.ndarray] = {}
    for name, write in QWEN3_VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            embed = _bidirectional if name in BIDIRECTIONAL else _sentence_transformers
            rows[name] = embed(Path(folder))
    np.savez_compressed(arguments.out / "qwen3_reference.npz", **rows)
    print({name: (value.shape, float(np.linalg.norm(value, axis=1).max())) for name, value in rows.items()})


def _sentence_transformers(folder: Path) -> np.ndarray:
    # By model type transformers would take a class that rebuilds the tokenizer from a vocabulary it does not have.
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    return np.stack([model.encode(text, show_progress_bar=False) for text in QWEN3_TEXTS])


@torch.inference_mode()
def _bidirectional(folder: Path) -> np.ndarray:
    """Mean pooling, not normalised."""
    fields = json.loads((folder / "config.json").read_text())
    for own in ("architectures", "auto_map", "model_type", "use_bidirectional_attention"):
        del fields[own]
    model = Qwen3Model(Qwen3Config(**fields)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(model.config.max_position_embeddings)
    rows = []
    for text in QWEN3_TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        visible = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
        hidden = model(ids, attention_mask={"full_attention": visible}).last_hidden_state
        rows.append(hidden[0].mean(dim=0).numpy())
    return np.stack(rows)


if __name__ == "__main__":
    main()
