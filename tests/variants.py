"""Edited copies of a sentence-transformers folder, each of which declares something else, and texts to tell them apart;
and tiny checkpoints of the Qwen3 family, likewise.

Shared by the tests that load them and by the scripts that let sentence-transformers and transformers load the very same
(`data/make_variant_reference.py`, `data/make_qwen3_reference.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import MAX_POSITIONS, pplx_config, qwen3_config, qwen3_tensors, write_pplx, write_qwen3

_POOLING = "1_Pooling/config.json"

TEXTS = [
    "How do I reset a forgotten password?",
    "Hello  World \n\t x",
    "a " * 400,
    " ",
    "<s> [SEP] [MASK]",
    "日本語 テスト",
    "ｆｕｌｌ ｗｉｄｔｈ Ⅻ ﬁ",
    "UPPER Case ÀÉ e\u0301 👩‍👩‍👧",
]


def write_variant(source: Path, target: Path, name: str) -> None:
    """A copy of the folder `source` with one edit. Its weights are a link: they are the same in all."""
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif path.suffix == ".safetensors":
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    VARIANTS[name](target)


def _edit(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _pooled_by(flag: str) -> Callable[[Path], None]:
    def set_flags(config: dict[str, object]) -> None:
        config.update({field: field == flag for field in config if field.startswith("pooling_mode")} | {flag: True})

    return lambda folder: _edit(folder / _POOLING, set_flags)


def _pooled_by_name(folder: Path) -> None:
    config = {"embedding_dimension": 384, "pooling_mode": "cls", "include_prompt": True}
    (folder / _POOLING).write_text(json.dumps(config))


def _without_normalize(folder: Path) -> None:
    _edit(folder / "modules.json", list.pop)


def _without_modules(folder: Path) -> None:
    (folder / "modules.json").unlink()


def _with_prompt(folder: Path) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    config = {"prompts": prompts, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


def _with_limit_of_12(folder: Path) -> None:
    _edit(folder / "sentence_bert_config.json", lambda config: config.update(max_seq_length=12))


def _with_later_class_names(folder: Path) -> None:
    names = (
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "sentence_transformers.base.modules.normalize.Normalize",
    )
    _edit(folder / "modules.json", lambda entries: [e.update(type=n) for e, n in zip(entries, names, strict=True)])


def _with_activation(name: str) -> Callable[[Path], None]:
    return lambda folder: _edit(folder / "config.json", lambda config: config.update(hidden_act=name))


VARIANTS: dict[str, Callable[[Path], None]] = {
    "unchanged": lambda folder: None,
    "cls": _pooled_by("pooling_mode_cls_token"),
    "max": _pooled_by("pooling_mode_max_tokens"),
    "last": _pooled_by("pooling_mode_lasttoken"),
    "cls_by_name": _pooled_by_name,
    "no_normalize": _without_normalize,
    "no_modules": _without_modules,
    "prompt": _with_prompt,
    "limit_12": _with_limit_of_12,
    "later_class_names": _with_later_class_names,
    "gelu_new": _with_activation("gelu_new"),
    "relu": _with_activation("relu"),
}


# --- tiny checkpoints of the Qwen3 family ---

# One word, one word more than once, and more words than there are positions: the end token stays.
QWEN3_TEXTS = [
    "w1",
    "w5 w9 w5 w60 w9",
    " ".join(f"w{7 * i % 61}" for i in range(MAX_POSITIONS + 20)),
    "w9 w5 w5 w60 w9",
]

# Every token visible: what these declare cannot be had from sentence-transformers without running a model's own code.
BIDIRECTIONAL = ("pplx", "pplx_8_heads_2_kv")


def _qwen3(seed: int, *, prefix: str = "", **changes: object) -> Callable[[Path], Path]:
    config = qwen3_config(**changes)
    return lambda folder: write_qwen3(
        folder,
        config=config,
        tensors={f"{prefix}{name}": tensor for name, tensor in qwen3_tensors(config, seed).items()},
    )


def _pplx(seed: int, **changes: object) -> Callable[[Path], Path]:
    config = pplx_config(**changes)
    return lambda folder: write_pplx(folder, config=config, tensors=qwen3_tensors(config, seed))


QWEN3_VARIANTS: dict[str, Callable[[Path], Path]] = {
    "4_heads_2_kv": _qwen3(1),
    "4_heads_1_kv": _qwen3(2, num_key_value_heads=1),
    "narrow_heads": _qwen3(3, num_attention_heads=2, head_dim=8, rope_theta=1000000.0),
    "language_model": _qwen3(4, prefix="model.", architectures=["Qwen3ForCausalLM"]),
    "rope_parameters": _qwen3(5, rope_theta=None, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}),
    "large_epsilon": _qwen3(6, rms_norm_eps=0.25),
    "not_causal": _qwen3(7, is_causal=False),
    "pplx": _pplx(8),
    "pplx_8_heads_2_kv": _pplx(9, num_attention_heads=8, head_dim=32),
}
