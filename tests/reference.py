"""What the worker's numbers are compared with: a BERT forward pass that follows the paper, not the worker.

One sequence at a time, one head at a time, float32 throughout, straight from the checkpoint's tensors. Nothing is
merged, batched, fused or reordered.

Source: Devlin et al., BERT (2018); Vaswani et al., Attention Is All You Need (2017).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

Matrix = npt.NDArray[np.float32]


class BertReference:
    """A checkpoint of the bare encoder (names without `bert.`)."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        """Of the last layer, float32 [tokens, hidden]."""
        words = self._tensors["embeddings.word_embeddings.weight"]
        positions = self._tensors["embeddings.position_embeddings.weight"]
        types = self._tensors["embeddings.token_type_embeddings.weight"]
        rows = [words[token] + positions[place] + types[0] for place, token in enumerate(token_ids)]
        hidden = self._norm("embeddings.LayerNorm", torch.stack(rows))
        for index in range(self._config["num_hidden_layers"]):
            hidden = self._layer(f"encoder.layer.{index}", hidden)
        return hidden

    def embed(self, token_ids: list[int], pooling: str = "mean") -> Matrix:
        """float32 [hidden], not normalised."""
        hidden = self.hidden_states(token_ids)
        row = {
            "mean": hidden.sum(dim=0) / len(token_ids),
            "cls": hidden[0],
            "last": hidden[-1],
            "max": hidden.max(dim=0).values,
        }[pooling]
        vector: Matrix = row.numpy()
        return vector

    def _layer(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            self._linear(f"{name}.attention.self.{part}", hidden) for part in ("query", "key", "value")
        )
        head_dim = self._config["hidden_size"] // self._config["num_attention_heads"]
        heads = []
        for start in range(0, self._config["hidden_size"], head_dim):
            columns = slice(start, start + head_dim)
            scores = query[:, columns] @ key[:, columns].T / math.sqrt(head_dim)  # [tokens, tokens]
            heads.append(torch.softmax(scores, dim=1) @ value[:, columns])
        attended = self._linear(f"{name}.attention.output.dense", torch.cat(heads, dim=1))
        hidden = self._norm(f"{name}.attention.output.LayerNorm", hidden + attended)
        inner = self._activation(self._linear(f"{name}.intermediate.dense", hidden))
        return self._norm(f"{name}.output.LayerNorm", hidden + self._linear(f"{name}.output.dense", inner))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim=1, keepdim=True)
        variance = (centred**2).mean(dim=1, keepdim=True)
        scaled = centred / torch.sqrt(variance + self._config["layer_norm_eps"])
        return scaled * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        name = self._config["hidden_act"]
        if name == "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        if name in {"gelu_new", "gelu_pytorch_tanh"}:
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if name == "relu":
            return x.clamp_min(0)
        assert name == "silu"
        return x / (1 + torch.exp(-x))


def unit(rows: Matrix) -> Matrix:
    """Rows at unit length."""
    scaled: Matrix = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled
