"""Edited copies of a sentence-transformers folder, each of which declares something else, and texts to tell them apart.

Shared by the test that loads them and by the script that lets sentence-transformers load the very same
(`data/make_variant_reference.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
