"""Tiny models with random weights, written the way checkpoints are: safetensors, JSON files, tokenizer.json.

Used by tests and benchmarks alike. Same seed, same bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from common.wire.messages import Batch

if TYPE_CHECKING:
    from worker.engine.engine import Engine

VOCAB_SIZE = 64
HIDDEN_SIZE = 32
MAX_POSITIONS = 48

Tensors = dict[str, torch.Tensor]


def bert_config(**changes: object) -> dict[str, object]:
    """The config.json of a tiny BertModel; `changes` replace or add fields."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 80,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": VOCAB_SIZE,
        **changes,
    }


def bert_tensors(config: dict[str, object], seed: int = 0) -> Tensors:
    """Every tensor that a BertModel of this configuration has, under the names of a bare encoder's checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    hidden, intermediate = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    tensors: Tensors = {}

    def table(name: str, rows: object) -> None:
        tensors[f"{name}.weight"] = torch.randn(int(str(rows)), hidden, generator=generator)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
        tensors[f"{name}.bias"] = 0.2 * torch.randn(hidden, generator=generator)

    def linear(name: str, inputs: int, outputs: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 * inputs**-0.5
        tensors[f"{name}.bias"] = 0.2 * torch.randn(outputs, generator=generator)

    table("embeddings.word_embeddings", config["vocab_size"])
    table("embeddings.position_embeddings", config["max_position_embeddings"])
    table("embeddings.token_type_embeddings", config["type_vocab_size"])
    norm("embeddings.LayerNorm")
    for index in range(int(str(config["num_hidden_layers"]))):
        layer = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", hidden, hidden)
        linear(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", hidden, intermediate)
        linear(f"{layer}.output.dense", intermediate, hidden)
        norm(f"{layer}.output.LayerNorm")
    return tensors


def roberta_config(**changes: object) -> dict[str, object]:
    """The config.json of a tiny RobertaModel: two rows of its position table are for padding."""
    roberta: dict[str, object] = {
        "architectures": ["RobertaModel"],
        "model_type": "roberta",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS + 2,
        "pad_token_id": 1,
        "type_vocab_size": 1,
    }
    return bert_config(**roberta | changes)


# `bert_tensors` are a RobertaModel's too: the names of a bare encoder are the same.


def distilbert_config(**changes: object) -> dict[str, object]:
    """The config.json of a tiny DistilBertModel."""
    return {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "activation": "gelu",
        "dim": HIDDEN_SIZE,
        "hidden_dim": 80,
        "max_position_embeddings": MAX_POSITIONS,
        "n_heads": 4,
        "n_layers": 2,
        "pad_token_id": 0,
        "sinusoidal_pos_embds": False,
        "vocab_size": VOCAB_SIZE,
        **changes,
    }


def distilbert_tensors(config: dict[str, object], seed: int = 0) -> Tensors:
    """Every tensor that a DistilBertModel of this configuration has: numbers of a BertModel, without its types."""
    twin = bert_config(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        hidden_size=config["dim"],
        intermediate_size=config["hidden_dim"],
        num_hidden_layers=config["n_layers"],
    )
    names = (
        (r"encoder\.layer", "transformer.layer"),
        (r"attention\.self\.(q|k|v)[a-z]+", r"attention.\1_lin"),
        (r"attention\.output\.dense", "attention.out_lin"),
        (r"attention\.output\.LayerNorm", "sa_layer_norm"),
        (r"intermediate\.dense", "ffn.lin1"),
        (r"output\.dense", "ffn.lin2"),
        (r"output\.LayerNorm", "output_layer_norm"),
    )
    tensors = bert_tensors(twin, seed)
    del tensors["embeddings.token_type_embeddings.weight"]
    for pattern, replacement in names:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def qwen3_config(**changes: object) -> dict[str, object]:
    """The config.json of a tiny Qwen3Model: two query heads a key head, heads wider than hidden_size / heads."""
    return {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
        **changes,
    }


def pplx_config(**changes: object) -> dict[str, object]:
    """The config.json of a tiny pplx-embed v1: a Qwen3Model without a causal mask, and code of its own."""
    config = qwen3_config(
        architectures=["PPLXQwen3Model"],
        auto_map={"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
        dtype="float32",
        model_type="bidirectional_pplx_qwen3",
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        use_bidirectional_attention=True,
        use_cache=False,
    )
    del config["rope_scaling"], config["rope_theta"]
    config |= changes
    return {"layer_types": ["full_attention"] * int(str(config["num_hidden_layers"])), **config}


def qwen3_tensors(config: dict[str, object], seed: int = 0) -> Tensors:
    """Every tensor that a Qwen3Model of this configuration has, under the names of the bare stack's checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, intermediate, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, kv = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    tensors: Tensors = {"embed_tokens.weight": torch.randn(sizes["vocab_size"], hidden, generator=generator)}

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)

    def linear(name: str, inputs: int, outputs: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 * inputs**-0.5

    for index in range(sizes["num_hidden_layers"]):
        layer = f"layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        for part, size in (("q", query), ("k", kv), ("v", kv)):
            linear(f"{layer}.self_attn.{part}_proj", hidden, size)
        norm(f"{layer}.self_attn.q_norm", head_dim)
        norm(f"{layer}.self_attn.k_norm", head_dim)
        linear(f"{layer}.self_attn.o_proj", query, hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        linear(f"{layer}.mlp.gate_proj", hidden, intermediate)
        linear(f"{layer}.mlp.up_proj", hidden, intermediate)
        linear(f"{layer}.mlp.down_proj", intermediate, hidden)
    norm("norm", hidden)
    return tensors


def tokenizer(num_words: int = VOCAB_SIZE - 3) -> Tokenizer:
    """Words w0, w1 … with ids from 3 on, between [CLS] and [SEP]."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{i}": i + 3 for i in range(num_words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def roberta_tokenizer() -> Tokenizer:
    """Words w0, w1 … with ids from 4 on, between <s> and </s>; <pad> is 1, as in RoBERTa's vocabularies."""
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i + 4 for i in range(VOCAB_SIZE - 4)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return made


def end_token_tokenizer() -> Tokenizer:
    """The same words, an end token after the last of them: what last-token pooling of a Qwen3-Embedding is given."""
    made = tokenizer()
    made.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)])
    return made


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: object) -> None:
    """Replace or add fields of a JSON object in a file."""
    write_json(path, json.loads(path.read_text()) | changes)


def write_bert(
    folder: Path,
    *,
    config: dict[str, object] | None = None,
    tensors: Tensors | None = None,
    pooling: str = "pooling_mode_mean_tokens",
    normalize: bool = True,
) -> Path:
    """A whole sentence-transformers folder around a tiny BertModel; returns it."""
    config = config or bert_config()
    tensors = tensors if tensors is not None else bert_tensors(config)
    ending = ["sentence_transformers.models.Normalize"] if normalize else []
    return _write_folder(folder, config, tensors, tokenizer(), pooling, ending)


def write_roberta(
    folder: Path,
    *,
    config: dict[str, object] | None = None,
    tensors: Tensors | None = None,
    pooling: str = "pooling_mode_mean_tokens",
    normalize: bool = True,
) -> Path:
    """A whole sentence-transformers folder around a tiny RobertaModel; returns it."""
    config = config or roberta_config()
    tensors = tensors if tensors is not None else bert_tensors(config)
    ending = ["sentence_transformers.models.Normalize"] if normalize else []
    return _write_folder(folder, config, tensors, roberta_tokenizer(), pooling, ending)


def write_distilbert(
    folder: Path,
    *,
    config: dict[str, object] | None = None,
    tensors: Tensors | None = None,
    pooling: str = "pooling_mode_mean_tokens",
    normalize: bool = True,
) -> Path:
    """A whole sentence-transformers folder around a tiny DistilBertModel; returns it."""
    config = config or distilbert_config()
    tensors = tensors if tensors is not None else distilbert_tensors(config)
    ending = ["sentence_transformers.models.Normalize"] if normalize else []
    return _write_folder(folder, config, tensors, tokenizer(), pooling, ending)


def write_qwen3(
    folder: Path,
    *,
    config: dict[str, object] | None = None,
    tensors: Tensors | None = None,
    pooling: str = "pooling_mode_lasttoken",
    normalize: bool = True,
) -> Path:
    """A whole sentence-transformers folder around a tiny Qwen3Model, in the way of Qwen3-Embedding; returns it."""
    config = config or qwen3_config()
    tensors = tensors if tensors is not None else qwen3_tensors(config)
    ending = ["sentence_transformers.models.Normalize"] if normalize else []
    return _write_folder(folder, config, tensors, end_token_tokenizer(), pooling, ending)


def write_pplx(folder: Path, *, config: dict[str, object] | None = None, tensors: Tensors | None = None) -> Path:
    """A whole sentence-transformers folder around a tiny pplx-embed v1: mean pooling, its quantiser; returns it.

    modules.json and 1_Pooling/config.json have all fields of perplexity-ai/pplx-embed-v1-0.6b (revision 2c4d510d). It
    has neither a sentence_bert_config.json nor a config_sentence_transformers.json. Its code is not written here.
    """
    config = config or pplx_config()
    tensors = tensors if tensors is not None else qwen3_tensors(config)
    ending = ["st_quantize.FlexibleQuantizer"]
    _write_folder(folder, config, tensors, tokenizer(), "pooling_mode_mean_tokens", ending)
    *others, quantizer = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*others, quantizer | {"path": "", "kwargs": ["quantization"]}])
    modes = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    off = {f"pooling_mode_{mode}": False for mode in modes}
    edit_json(folder / "1_Pooling" / "config.json", **off, include_prompt=True)
    write_json(folder / "tokenizer_config.json", {"bos_token": None, "model_max_length": 131_072})
    return folder


def _write_folder(
    folder: Path,
    config: dict[str, object],
    tensors: Tensors,
    text_tokenizer: Tokenizer,
    pooling: str,
    ending: list[str],
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text(text_tokenizer.to_str())
    types = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *ending]
    paths = ["", "1_Pooling", "2_Normalize"]
    write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": kind}
            for index, (kind, path) in enumerate(zip(types, paths, strict=False))
        ],
    )
    width = config.get("hidden_size", config.get("dim"))
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, pooling: True})
    return folder


def random_sequences(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def make_batch(
    sequences: list[list[int]],
    *,
    width: int = HIDDEN_SIZE,
    dimensions: list[int] | None = None,
    normalize: list[int] | None = None,
    encodings: list[int] | None = None,
    type_starts: list[int] | None = None,
    spans: list[list[tuple[int, int]]] | None = None,
    epoch: int = 1,
    batch_id: int = 1,
) -> Batch:
    """A batch of these sequences; without options all `width` columns count, as float32 that is not normalised.

    `spans` are a list for each sequence, of one row each.
    """
    sides = [side for of_sequence in spans or [] for side in of_sequence]
    return Batch(
        epoch=epoch,
        batch_id=batch_id,
        token_ids=np.concatenate([np.array(sequence, dtype=np.int32) for sequence in sequences]),
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        dimensions=np.array(dimensions or [width] * len(sequences), dtype=np.int32),
        normalize=np.array(normalize or [0] * len(sequences), dtype=np.uint8),
        encodings=np.array(encodings or [0] * len(sequences), dtype=np.uint8),
        type_starts=np.array(type_starts or [], dtype=np.int32),
        span_counts=np.array([len(of_sequence) for of_sequence in spans or []], dtype=np.int32),
        spans=np.array(sides, dtype=np.int32).reshape(-1, 2),
    )


def embed(engine: Engine, sequences: list[list[int]], **options: object) -> npt.NDArray[np.float32]:
    """The float32 rows of a batch of these sequences; `options` are those of `make_batch`."""
    batch = make_batch(sequences, **options)  # type: ignore[arg-type]  # options by name
    return engine.step(batch).numpy().rows.view(np.float32)
