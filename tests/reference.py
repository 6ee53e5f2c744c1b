"""What the worker's numbers are compared with: forward passes that follow the papers, not the worker.

One sequence at a time, one head at a time, float32 throughout, straight from the checkpoint's tensors. Nothing is
merged, batched, fused or reordered.

Source: Devlin et al., BERT (2018); Qwen Team, Qwen3 Technical Report (2025); Vaswani et al., Attention Is All You Need
(2017); Su et al., RoFormer (2021), with the two halves of a head as the pairs.
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
        return _pooled(hidden, pooling)

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


class Qwen3Reference:
    """A checkpoint of the bare stack (names without `model.`), causal or not."""

    def __init__(self, folder: Path, *, causal: bool) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self._theta = self._config.get("rope_theta") or self._config["rope_parameters"]["rope_theta"]
        self._causal = causal

    def hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        """Of the last layer, after the last norm, float32 [tokens, hidden]."""
        hidden = torch.stack([self._tensors["embed_tokens.weight"][token] for token in token_ids])
        for index in range(self._config["num_hidden_layers"]):
            hidden = self._layer(f"layers.{index}", hidden)
        return self._norm("norm", hidden)

    def embed(self, token_ids: list[int], pooling: str = "last") -> Matrix:
        """float32 [hidden], not normalised."""
        return _pooled(self.hidden_states(token_ids), pooling)

    def _layer(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", hidden))
        x = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = self._linear(f"{name}.mlp.gate_proj", x)
        inner = gate / (1 + torch.exp(-gate)) * self._linear(f"{name}.mlp.up_proj", x)
        return hidden + self._linear(f"{name}.mlp.down_proj", inner)

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = self._config["num_attention_heads"], self._config["head_dim"]
        group_size = num_heads // self._config["num_key_value_heads"]
        all_queries, all_keys, all_values = (self._linear(f"{name}.{part}_proj", x) for part in "qkv")
        heads = []
        for head in range(num_heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            shared = slice(head // group_size * head_dim, (head // group_size + 1) * head_dim)
            query = self._turn(self._norm(f"{name}.q_norm", all_queries[:, own]))
            key = self._turn(self._norm(f"{name}.k_norm", all_keys[:, shared]))
            scores = query @ key.T / math.sqrt(head_dim)  # [tokens, tokens]
            if self._causal:
                later = torch.ones_like(scores).triu(diagonal=1) == 1
                scores = scores.masked_fill(later, -torch.inf)
            heads.append(torch.softmax(scores, dim=1) @ all_values[:, shared])
        return self._linear(f"{name}.o_proj", torch.cat(heads, dim=1))

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, head_dim], columns i and i + head_dim / 2 turned as a pair, by position · theta^(-2i / head_dim)."""
        half = x.shape[1] // 2
        turned = torch.empty_like(x)
        for position in range(x.shape[0]):
            for i in range(half):
                angle = position * self._theta ** (-2 * i / x.shape[1])
                first, second = x[position, i], x[position, i + half]
                turned[position, i] = first * math.cos(angle) - second * math.sin(angle)
                turned[position, i + half] = second * math.cos(angle) + first * math.sin(angle)
        return turned

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean_square = (x**2).mean(dim=1, keepdim=True)
        return x / torch.sqrt(mean_square + self._config["rms_norm_eps"]) * self._tensors[f"{name}.weight"]


def _pooled(hidden: torch.Tensor, pooling: str) -> Matrix:
    row = {
        "mean": hidden.sum(dim=0) / len(hidden),
        "cls": hidden[0],
        "last": hidden[-1],
        "max": hidden.max(dim=0).values,
    }[pooling]
    vector: Matrix = row.numpy()
    return vector


def unit(rows: Matrix) -> Matrix:
    """Rows at unit length."""
    scaled: Matrix = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled
