"""One change to a good folder, and it is refused: within seconds, on one line that names the file and what is wrong in
it. None of the folder's code is run, and nothing is fetched.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import (
    Tensors,
    bert_config,
    bert_tensors,
    edit_json,
    tokenizer,
    write_bert,
    write_json,
    write_pplx,
    write_qwen3,
)
from tests.timing import assert_in_time
from tests.worker.conftest import make_engine
from worker.checkpoint.files import ModelError
from worker.process.inspection import Inspection

ROOT = Path(__file__).parent.parent.parent
LONGEST_S = 5
QUERY = "encoder.layer.0.attention.self.query.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, MODULES, TOKENIZER = "config.json", "modules.json", "tokenizer.json"
POOLING, SETTINGS, TRANSFORMER = (
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
MARKER = "this-code-was-run"

Change = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A folder that must be refused."""

    name: str
    change: Change
    message: str  # how the refusal goes on after the folder's path, as a regular expression
    write: Callable[[Path], Path] = write_bert
    by_numbers: bool = False  # only reading the weights' numbers tells


def tensors(change: Callable[[Tensors], object]) -> Change:
    """Rewrites the weights."""

    def rewrite(folder: Path) -> None:
        changed = load_file(folder / WEIGHTS)
        change(changed)
        save_file(changed, folder / WEIGHTS)

    return rewrite


def config(file: str = CONFIG, **changes: object) -> Change:
    """Replaces or adds fields of a JSON file, which need not be there."""

    def edit(folder: Path) -> None:
        if not (folder / file).exists():
            write_json(folder / file, {})
        edit_json(folder / file, **changes)

    return edit


def text(file: str, content: str) -> Change:
    return lambda folder: (folder / file).write_text(content)


def no(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def replaced(file: str, make: Callable[[Path], object]) -> Change:
    """Puts something else where a file was."""

    def replace(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return replace


def linked_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def module(index: int, **changes: object) -> Change:
    """Changes an entry of modules.json."""

    def edit(folder: Path) -> None:
        entries = json.loads((folder / MODULES).read_text())
        entries[index] |= changes
        write_json(folder / MODULES, entries)

    return edit


def bytes_of(change: Callable[[bytes], bytes]) -> Change:
    """Rewrites the file of the weights as bytes."""
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def overlapping(content: bytes) -> bytes:
    stop = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:stop])
    offsets = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["data_offsets"] == offsets[1]:
            tensor["data_offsets"] = [0, offsets[1][1] - offsets[1][0]]
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content[stop:]


def as_shards(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    parts = bert_tensors(bert_config())
    query = {QUERY: parts.pop(QUERY)}
    save_file(query, folder / "a-1.safetensors")
    save_file(parts, folder / "a-2.safetensors")
    weight_map = {QUERY: "a-1.safetensors", **dict.fromkeys(parts, "a-2.safetensors")}
    write_json(folder / INDEX, {"weight_map": weight_map})


def without_a_shard(folder: Path) -> None:
    as_shards(folder)
    (folder / "a-2.safetensors").unlink()


def with_a_misplaced_tensor(folder: Path) -> None:
    as_shards(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    write_json(folder / INDEX, {"weight_map": weight_map | {QUERY: "a-2.safetensors"}})


def as_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(bert_tensors(bert_config()), folder / "pytorch_model.bin")


def of_another_hidden_size(folder: Path) -> None:
    (folder / MODULES).unlink()  # which say it too
    edit_json(folder / CONFIG, hidden_size=2**18)


def with_dense(folder: Path) -> None:
    entries = json.loads((folder / MODULES).read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    write_json(folder / MODULES, [*entries[:2], dense])
    write_json(
        folder / "3_Dense" / CONFIG,
        {"in_features": 32, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"},
    )
    save_file({"linear.weight": torch.zeros(8, 32)}, folder / "3_Dense" / WEIGHTS)


MUTANTS = [
    # the file of the weights
    Mutant("truncated", bytes_of(lambda content: content[:-4]), f"{WEIGHTS} is damaged: its tensors end at"),
    Mutant("empty_weights", bytes_of(lambda content: b""), f"{WEIGHTS} is damaged: 0 bytes"),
    Mutant("longer", bytes_of(lambda content: content + bytes(4)), f"{WEIGHTS} is damaged: its tensors end at"),
    Mutant("huge_header", bytes_of(lambda content: b"\xff" * 7 + content[7:]), f"{WEIGHTS} is damaged: .* header"),
    Mutant("short_header", bytes_of(lambda content: b"\x20" + bytes(7) + content[8:]), f"{WEIGHTS} is damaged: .*JSON"),
    Mutant("overlapping", bytes_of(overlapping), f"{WEIGHTS} is damaged: tensor .* begins at byte"),
    Mutant("pickle_in_disguise", lambda folder: torch.save({}, folder / WEIGHTS), f"{WEIGHTS} is damaged"),
    Mutant("pickle_alone", as_pickle, f"{WEIGHTS} is missing: .*found pytorch_model.bin.*from_pretrained"),
    Mutant("no_weights", no(WEIGHTS), f"{WEIGHTS} is missing: only safetensors"),
    Mutant("weights_are_a_folder", replaced(WEIGHTS, Path.mkdir), f"{WEIGHTS} is not a regular file"),
    Mutant("weights_are_a_pipe", replaced(WEIGHTS, os.mkfifo), f"{WEIGHTS} is not a regular file"),
    Mutant("weights_link_to_themselves", replaced(WEIGHTS, linked_to_itself), f"{WEIGHTS} is missing"),
    Mutant("a_shard_is_missing", without_a_shard, "a-2.safetensors is missing"),
    Mutant("a_shard_holds_what_another_should", with_a_misplaced_tensor, f"{INDEX}: weight_map: tensor {QUERY}"),
    # the tensors in it
    Mutant("missing_tensor", tensors(lambda held: held.pop(QUERY)), f"{WEIGHTS}: .* Missing tensors: {QUERY}"),
    Mutant("extra_tensor", tensors(lambda held: held.update(x=torch.ones(1))), f"{WEIGHTS}: .* Unexpected tensors: x"),
    Mutant(
        "renamed_tensor",
        tensors(lambda held: held.update({f"{QUERY}s": held.pop(QUERY)})),
        f"{WEIGHTS}: .* Missing tensors: {QUERY}. Unexpected tensors: {QUERY}s",
    ),
    Mutant(
        "same_tensor_under_two_names",
        tensors(lambda held: held.update({f"bert.{QUERY}": held[QUERY].clone()})),
        f"{WEIGHTS}: tensor {QUERY}: {QUERY} is there twice",
    ),
    Mutant(
        "wrong_shape",
        tensors(lambda held: held.update({QUERY: torch.ones(32, 16)})),
        rf"{WEIGHTS}: tensor {QUERY}: shape \[32, 16\], but the model needs \[32, 32\]",
    ),
    Mutant(
        "transposed",
        tensors(lambda held: held.update({"encoder.layer.0.intermediate.dense.weight": torch.ones(32, 80)})),
        rf"{WEIGHTS}: tensor encoder.layer.0.intermediate.dense.weight: shape \[32, 80\]",
    ),
    Mutant(
        "integers",
        tensors(lambda held: held.update({QUERY: torch.ones(32, 32, dtype=torch.int64)})),
        f"{WEIGHTS}: tensor {QUERY}: dtype I64 is not supported",
    ),
    Mutant(
        "nan",
        tensors(lambda held: held[QUERY][31, 31].fill_(torch.nan)),
        f"{WEIGHTS}: tensor {QUERY}: holds a NaN",
        by_numbers=True,
    ),
    Mutant(
        "infinity",
        tensors(lambda held: held["norm.weight"][0].fill_(torch.inf)),
        f"{WEIGHTS}: tensor norm.weight: holds a NaN or an infinity",
        write_qwen3,
        by_numbers=True,
    ),
    Mutant(
        "language_models_head_alone",
        tensors(lambda held: held.update({"lm_head.weight": held.pop("embed_tokens.weight")})),
        f"{WEIGHTS}: .* Missing tensors: embed_tokens.weight",
        write_qwen3,
    ),
    Mutant("a_layer_more_than_config_says", config(num_hidden_layers=1), f"{WEIGHTS}: .* Unexpected tensors: encoder"),
    Mutant("a_layer_less_than_config_says", config(num_hidden_layers=9), f"{WEIGHTS}: .* Missing tensors: encoder"),
    # config.json
    Mutant("config_is_no_json", text(CONFIG, "{'a': 1}"), f"{CONFIG} is not JSON"),
    Mutant("config_is_empty", text(CONFIG, ""), f"{CONFIG} is not JSON"),
    Mutant("config_is_a_list", text(CONFIG, "[]"), f"{CONFIG}: a JSON object is needed, not list"),
    Mutant("config_is_deep", text(CONFIG, "[" * 200_000), f"{CONFIG} is not JSON"),
    Mutant("config_is_binary", text(CONFIG, "\x00\x01"), f"{CONFIG} is not JSON"),
    Mutant("config_is_missing", no(CONFIG), f"{CONFIG} is missing"),
    Mutant("config_is_a_pipe", replaced(CONFIG, os.mkfifo), f"{CONFIG} is not a regular file"),
    Mutant("config_is_a_folder", replaced(CONFIG, Path.mkdir), f"{CONFIG} is not a regular file"),
    Mutant("config_links_to_itself", replaced(CONFIG, linked_to_itself), f"{CONFIG} is missing"),
    Mutant("unknown_architecture", config(architectures=["BertForEverything"]), f"{CONFIG}: architectures: .*"),
    Mutant("two_architectures", config(architectures=["BertModel"] * 2), f"{CONFIG}: architectures: "),
    Mutant("no_architecture", config(architectures=None), f"{CONFIG}: architectures: "),
    Mutant("own_code", config(auto_map={"AutoModel": "modeling.X"}), f"{CONFIG}: auto_map: .*never run"),
    Mutant(
        "own_code_beside_known_code",
        config(auto_map={"AutoModel": "modeling.PPLXQwen3Model", "AutoConfig": "modeling.X"}),
        f"{CONFIG}: auto_map: 'modeling.X' is code of the model's own",
        write_pplx,
    ),
    Mutant("quantized", config(quantization_config={"bits": 4}), f"{CONFIG}: quantization_config: "),
    Mutant("another_model_type", config(model_type="gpt2"), f"{CONFIG}: model_type: 'gpt2'"),
    Mutant("unknown_activation", config(hidden_act="gelu_13"), f"{CONFIG}: hidden_act: 'gelu_13' is not supported"),
    Mutant("heads_that_do_not_divide", config(num_attention_heads=5), f"{CONFIG}: num_attention_heads: 5 does not"),
    Mutant("heads_in_a_text", config(num_attention_heads="4"), f"{CONFIG}: num_attention_heads: a positive integer"),
    Mutant("no_layers", config(num_hidden_layers=0), f"{CONFIG}: num_hidden_layers: a positive integer"),
    Mutant("no_hidden_size", config(hidden_size=None), f"{CONFIG}: hidden_size: missing"),
    Mutant("wrong_hidden_size", config(hidden_size=64), "(1_Pooling/config.json: .* 64 wide|model.safetensors: .*64)"),
    Mutant("epsilon_of_nan", config(layer_norm_eps=float("nan")), f"{CONFIG}: layer_norm_eps: a number"),
    Mutant("decoder", config(is_decoder=True), f"{CONFIG}: is_decoder: only encoders"),
    Mutant("relative_positions", config(position_embedding_type="relative_key"), f"{CONFIG}: position_embedding_type"),
    Mutant("fewer_rows_than_words", config(vocab_size=32), f"{TOKENIZER}: its ids go up to 63, but .*vocab_size is 32"),
    Mutant(
        "unknown_scaling",
        config(rope_scaling={"rope_type": "moebius", "factor": 2.0}),
        f"{CONFIG}: rope_scaling",
        write_qwen3,
    ),
    Mutant("odd_head", config(head_dim=15), f"{CONFIG}: head_dim: 15 is odd", write_qwen3),
    Mutant("a_million_layers_by_another_name", config(n_layer=10**6), f"{CONFIG}: n_layer: 1000000 is more than"),
    Mutant("a_million_layers", config(num_hidden_layers=10**6), f"{CONFIG}: num_hidden_layers: 1000000 is more than"),
    Mutant(
        "a_billion_positions",
        config(max_position_embeddings=10**9),
        f"{CONFIG}: max_position_embeddings: 1000000000 is more than",
        write_qwen3,
    ),
    Mutant(
        "a_billion_positions_by_scaling",
        config(max_position_embeddings=2**20, rope_scaling={"rope_type": "dynamic", "factor": 1000.0}),
        f"{CONFIG}: rope_scaling, rope_parameters: 1048576000 positions",
        write_qwen3,
    ),
    Mutant(
        "more_positions_than_rows",
        config(max_position_embeddings=2**22),
        rf"{WEIGHTS}: tensor embeddings.position_embeddings.weight: shape .* needs \[4194304, 32\]",
    ),
    Mutant("a_billion_columns", config(intermediate_size=10**9), f"{CONFIG}: intermediate_size: 1000000000 is more"),
    Mutant(
        "a_hidden_size_of_others",
        of_another_hidden_size,
        rf"{WEIGHTS}: tensor embed_tokens.weight: shape .* needs \[64, 262144\]",
        write_qwen3,
    ),
    Mutant(
        "an_intermediate_size_of_others",
        config(intermediate_size=2**18),
        rf"{WEIGHTS}: tensor encoder.layer.0.intermediate.dense.bias: shape .* needs \[262144\]",
    ),
    Mutant(
        "a_vocabulary_of_others",
        config(vocab_size=2**31 - 1),
        rf"{WEIGHTS}: tensor embeddings.word_embeddings.weight: shape .* needs \[2147483647, 32\]",
    ),
    Mutant("a_vocabulary_beyond_any", config(vocab_size=2**31), f"{CONFIG}: vocab_size: 2147483648 is more"),
    # tokenizer.json
    Mutant("no_tokenizer", no(TOKENIZER), f"{TOKENIZER} is missing"),
    Mutant("broken_tokenizer", text(TOKENIZER, '{"model": {'), f"{TOKENIZER}: not a tokenizer"),
    Mutant("tokenizer_without_a_model", text(TOKENIZER, "{}"), f"{TOKENIZER}: not a tokenizer"),
    Mutant(
        "more_words_than_rows", text(TOKENIZER, tokenizer(200).to_str()), f"{TOKENIZER}: its ids go up to 202, but .*64"
    ),
    # modules.json, and where it leads
    Mutant("modules_are_no_list", text(MODULES, "{}"), f"{MODULES}: a list of modules is needed"),
    Mutant("unknown_module", module(2, type="sentence_transformers.models.LSTM"), f"{MODULES}: type: .*LSTM"),
    Mutant("module_of_others", module(2, type="modeling.Normalize"), f"{MODULES}: type: .*modeling.Normalize"),
    Mutant("module_above_the_folder", module(1, path="../x"), rf"{MODULES}: path: '\.\./x' leads out"),
    Mutant("module_at_the_root", module(1, path="/etc"), f"{MODULES}: path: '/etc' leads out"),
    Mutant("module_that_is_not_there", module(1, path="7_Pooling"), f"7_Pooling/{CONFIG} is missing"),
    Mutant("no_pooling", config(POOLING, pooling_mode_mean_tokens=False), f"{POOLING}: pooling_mode"),
    Mutant("unknown_pooling", config(POOLING, pooling_mode="sum"), f"{POOLING}: pooling_mode"),
    Mutant("unknown_field_of_pooling", config(POOLING, attention_heads=3), f"{POOLING}: attention_heads: a field"),
    Mutant("wrong_width_of_pooling", config(POOLING, word_embedding_dimension=31), f"{POOLING}: word_embedding_dim"),
    Mutant("unknown_setting", config(SETTINGS, rescale=2), f"{SETTINGS}: rescale: a field"),
    Mutant(
        "default_that_is_no_prompt",
        config(SETTINGS, prompts={"passage": "p: "}, default_prompt_name="question"),
        f"{SETTINGS}: default_prompt_name: 'question'",
    ),
    Mutant("prompts_in_a_list", config(SETTINGS, prompts=["q: "]), f"{SETTINGS}: prompts: a map"),
    Mutant("no_tokens_at_all", config(TRANSFORMER, max_seq_length=0), f"{TRANSFORMER}: max_seq_length: a positive"),
    Mutant("unknown_field_of_transformer", config(TRANSFORMER, chunks=2), f"{TRANSFORMER}: chunks: "),
    Mutant("dense_without_bias", with_dense, f"3_Dense/{WEIGHTS}: .* Missing tensors: linear.bias"),
]


@pytest.fixture(params=MUTANTS, ids=lambda mutant: mutant.name)
def mutant(request: pytest.FixtureRequest) -> Mutant:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"something wants to connect: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the mutant is to be written; code that lies in it must not have run at the end."""
    marker = tmp_path / MARKER
    folder = tmp_path / "mutant"
    for name in ("modeling.py", "configuration.py", "st_quantize.py", "__init__.py", "torch.py", "1_Pooling/code.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit('this code was run')\n")
    yield folder
    assert not marker.exists()


def refusal_of(mutant: Mutant, folder: Path) -> str:
    return rf"{folder}/{mutant.message}"


def test_a_mutant_is_refused_in_one_line_within_seconds(mutant: Mutant, folder: Path) -> None:
    mutant.write(folder)
    mutant.change(folder)
    began_s = time.monotonic()

    with pytest.raises(ModelError, match=refusal_of(mutant, folder)) as refusal:
        make_engine(folder)

    assert_in_time(time.monotonic() - began_s, LONGEST_S)
    assert str(refusal.value).isprintable()


def test_an_inspection_finds_all_that_the_headers_tell(mutant: Mutant, folder: Path) -> None:
    mutant.write(folder)
    mutant.change(folder)

    inspection = Inspection.of("mutant", folder)

    assert inspection.servable == mutant.by_numbers
    if not mutant.by_numbers:
        assert any(re.match(refusal_of(mutant, folder), problem) for problem in inspection.problems)


@pytest.mark.parametrize("write", [write_bert, write_qwen3, write_pplx])
def test_the_folders_that_are_changed_are_good(folder: Path, write: Callable[[Path], Path]) -> None:
    write(folder)

    make_engine(folder)

    assert Inspection.of("good", folder).problems == []


# --- the real commands ---


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run in the folder itself, where Python would find the code that lies there."""
    return subprocess.run(
        [sys.executable, "-P", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


HEDGEROW = "import sys; from common.deploy.cli import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_code", "config_is_a_pipe", "config_is_no_json"])
def test_a_check_of_the_folder_ends_with_78(folder: Path, name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    mutant.write(folder)
    mutant.change(folder)

    ended = run(folder, "-m", "worker.checkpoint.declared", str(folder))

    assert (ended.returncode, ended.stderr.count("\n")) == (78, 1)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_code", "missing_tensor", "weights_are_a_pipe"])
def test_an_inspection_of_the_folder_ends_with_78(folder: Path, name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    mutant.write(folder)
    mutant.change(folder)

    ended = run(folder, "-c", HEDGEROW, "inspect", str(folder))

    assert (ended.returncode, ended.stderr) == (78, "")
    assert "This model is refused:" in ended.stdout


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_code", "missing_tensor", "nan", "weights_are_a_pipe"])
def test_a_worker_ends_with_78(folder: Path, run_dir: str, name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    mutant.write(folder)
    mutant.change(folder)

    ended = run(folder, "-c", HEDGEROW, "worker", "--model", str(folder), "--run-dir", run_dir, "--device", "cpu")

    assert ended.returncode == 78
    assert "Traceback" not in ended.stderr
