"""A library that embeds in its own process, for `peers.py`: texts in on standard input, vectors and seconds out.

    python in_process.py sentence-transformers|onnxruntime FOLDER THREADS

Run by the Python of the library's own environment, so nothing of the project is imported. A line is a JSON list of
texts; its answer a JSON object: `seconds` that the library took for it, and `rows`, base64 of float32
[texts, dimensions]. The first line that is written, `{"ready": …}`, says what was loaded.

- sentence-transformers: `SentenceTransformer(FOLDER).encode`, batches of 32, as its users call it.
- onnxruntime: the same model exported to ONNX here, run as a careful user would: texts sorted by length, batches of 32,
  padded to the longest of the batch, mean pooling and normalisation in numpy.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

Encode = Callable[[list[str]], np.ndarray]

_BATCH = 32


def load_sentence_transformers(folder: str, threads: int) -> tuple[Encode, str]:
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    model = sentence_transformers.SentenceTransformer(folder, device="cpu")
    name = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    return lambda texts: np.asarray(model.encode(texts, batch_size=_BATCH, show_progress_bar=False)), name


def load_onnxruntime(folder: str, threads: int) -> tuple[Encode, str]:
    """Of a model of the BERT family with mean pooling and normalisation."""
    import onnxruntime
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    limit = json.loads(Path(folder, "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = model(**dict(zip(names, given, strict=True))).last_hidden_state
            return hidden

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = torch.ones(2, 7, dtype=torch.int64)
    mask = example.clone()
    mask[1, 5:] = 0  # a mask of ones is taken for none
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=limit)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    with TemporaryDirectory() as place:
        path = f"{place}/model.onnx"
        torch.onnx.export(
            Hidden().eval(),
            (example, mask, example * 0),
            path,
            input_names=names,
            output_names=["hidden"],
            dynamic_shapes={"given": (axes, axes, axes)},
            dynamo=True,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> np.ndarray:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        rows: list[np.ndarray] = [np.empty(0)] * len(ids)
        for first in range(0, len(order), _BATCH):
            batch = order[first : first + _BATCH]
            tokens = np.zeros((len(batch), len(ids[batch[0]])), dtype=np.int64)
            mask = np.zeros_like(tokens)
            for row, index in enumerate(batch):
                tokens[row, : len(ids[index])] = ids[index]
                mask[row, : len(ids[index])] = 1
            (hidden,) = session.run(None, dict(zip(names, (tokens, mask, np.zeros_like(tokens)), strict=True)))
            weights = mask[..., None].astype(np.float32)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for row, index in enumerate(batch):
                rows[index] = pooled[row]
        return np.stack(rows)

    return encode, f"onnxruntime {onnxruntime.__version__}"


def main() -> int:
    kind, folder, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    load = {"sentence-transformers": load_sentence_transformers, "onnxruntime": load_onnxruntime}[kind]
    encode, name = load(folder, threads)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began_s = time.perf_counter()
        rows = encode(texts)
        seconds = time.perf_counter() - began_s
        encoded = base64.b64encode(np.ascontiguousarray(rows, dtype="<f4").tobytes()).decode()
        print(json.dumps({"seconds": seconds, "rows": encoded}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
