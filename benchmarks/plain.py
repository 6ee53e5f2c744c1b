"""What the engine is compared with: a Qwen3 forward pass in plain torch, as transformers writes it.

Nothing is merged and nothing is fused, so it is slow and easy to check; it shares no code with the worker but how
config.json is read. In bfloat16, eagerly and as a CUDA graph, it is a peer in time; in float32 it is the reference of
numbers. Sequences have equal lengths, so that no padding and no mask is needed, which flatters it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch.nn.functional import embedding, linear, normalize, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from common.wire.messages import Batch
    from worker.checkpoint.modules import Pooling
    from worker.models.families.qwen3 import Qwen3Config

Rows = npt.NDArray[np.float32]
Read = Callable[[], Rows]  # waits for the rows of a step that was launched
Launch = Callable[["Batch"], Read]


class PlainQwen3:
    """Sequences of equal length through torch's own operations, nothing merged and nothing fused.

    Source: the order of operations of transformers' Qwen3Model.
    """

    def __init__(
        self, folder: Path, config: Qwen3Config, pooling: Pooling, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._pooling = pooling
        self._device = device
        self._weights: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    self._weights[name.removeprefix("model.")] = file.get_tensor(name).to(device, dtype)
        exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
        self._frequencies = config.rope.theta**-exponents

    @torch.inference_mode()
    def __call__(self, token_ids: torch.Tensor, *, reference: bool = False) -> torch.Tensor:
        """float32 [sequences, hidden] of unit length, of int [sequences, length]; `reference`: all in float32."""
        config, weights = self._config, self._weights
        hidden = embedding(token_ids, weights["embed_tokens.weight"])
        if reference:
            hidden = hidden.float()
        angles = torch.outer(torch.arange(token_ids.shape[1], device=self._device).float(), self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)  # [length, head_dim]
        for index in range(config.num_layers):
            layer = f"layers.{index}."
            attended = self._attend(layer + "self_attn.", self._norm(hidden, f"{layer}input_layernorm"), cos, sin)
            hidden = hidden + attended
            normed = self._norm(hidden, f"{layer}post_attention_layernorm")
            gated = silu(self._linear(normed, f"{layer}mlp.gate_proj")) * self._linear(normed, f"{layer}mlp.up_proj")
            hidden = hidden + self._linear(gated, f"{layer}mlp.down_proj")
        hidden = self._norm(hidden, "norm").float()
        pooled = {"cls": hidden[:, 0], "last": hidden[:, -1], "mean": hidden.mean(1), "max": hidden.amax(1)}
        return normalize(pooled[self._pooling], dim=-1)

    def variant(self) -> Launch:
        """Eager, from a batch of equal lengths."""

        def launch(batch: Batch) -> Read:
            token_ids = as_matrix(batch).to(self._device, non_blocking=True)
            return _fetch(self(token_ids))

        return launch

    def graph_variant(self, batch: Batch) -> Launch:
        """As one CUDA graph, for batches of this one's shape."""
        inputs = as_matrix(batch).to(self._device)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's gap
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = self(inputs)

        def launch(batch: Batch) -> Read:
            inputs.copy_(as_matrix(batch), non_blocking=True)
            graph.replay()
            return _fetch(rows)

        return launch

    def _attend(self, name: str, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        config = self._config
        heads = (*normed.shape[:2], -1, config.head_dim)
        query = self._norm(self._linear(normed, f"{name}q_proj").view(heads), f"{name}q_norm").transpose(1, 2)
        key = self._norm(self._linear(normed, f"{name}k_proj").view(heads), f"{name}k_norm").transpose(1, 2)
        value = (
            self._linear(normed, f"{name}v_proj").view(heads).transpose(1, 2)
        )  # [sequences, heads, length, head_dim]
        query = query * cos + _rotate_half(query) * sin
        key = key * cos + _rotate_half(key) * sin
        grouped = config.num_heads != config.num_kv_heads
        if grouped and query.dtype == torch.float32:  # torch's kernel for float32 knows no groups
            key, value = (part.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for part in (key, value))
            grouped = False
        attended = scaled_dot_product_attention(query, key, value, is_causal=config.causal, enable_gqa=grouped)
        return self._linear(attended.transpose(1, 2).flatten(2), f"{name}o_proj")

    def _linear(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        return linear(inputs, self._weights[f"{name}.weight"].to(inputs.dtype))

    def _norm(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        wide = inputs.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.epsilon)
        return self._weights[f"{name}.weight"].to(inputs.dtype) * wide.to(inputs.dtype)


def _rotate_half(inputs: torch.Tensor) -> torch.Tensor:
    left, right = inputs.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def as_matrix(batch: Batch) -> torch.Tensor:
    """The token ids of a batch of equal lengths, int32 [sequences, length] on the host."""
    token_ids = torch.from_numpy(batch.token_ids).view(len(batch.lengths), -1)
    return token_ids.pin_memory() if torch.cuda.is_available() else token_ids


def _fetch(rows: torch.Tensor) -> Read:
    """Start the rows on their way to the host."""
    if not rows.is_cuda:
        return rows.numpy
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's gap
    copied.record()

    def read() -> Rows:
        copied.synchronize()
        return host.numpy()

    return read
