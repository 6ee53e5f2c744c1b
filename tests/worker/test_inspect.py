"""`hedgerow inspect`: what is shown of a good folder, all that is wrong with a bad one, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import (
    edit_json,
    write_bert,
    write_distilbert,
    write_json,
    write_pplx,
    write_qwen3,
    write_roberta,
)
from worker.process.inspection import Inspection

QUERY = "encoder.layer.0.attention.self.query.weight"
ROOT = Path(__file__).parent.parent.parent


def inspect(folder: Path) -> Inspection:
    return Inspection.of("tiny", folder)


def test_a_good_folder_is_described(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": True})
    write_json(
        folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    )

    described = json.loads(inspect(folder).to_json())

    assert (described["name"], described["folder"]) == ("tiny", str(folder))
    assert (described["servable"], described["problems"]) == (True, [])
    declared = described["declared"]
    assert (declared["architecture"], declared["normalize"], declared["lower_case"]) == ("BertModel", True, True)
    assert (declared["prompts"]["query"], declared["default_prompt_name"]) == ("q: ", "query")
    assert described["model"] == {
        "code": "worker.models.families.bert",
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "vocab_size": 64,
        "positions": 48,
        "causal": False,
        "windowed": False,
        "biased": False,
        "parameters": 22880,
    }
    assert described["length"] == {"max_tokens": 24, "max_tokens_from": "sentence_bert_config.json (max_seq_length)"}
    assert described["tokenizer"] == {
        "tokenizer": "WordLevel",
        "words": 64,
        "largest_id": 63,
        "special_tokens": 2,
        "text_becomes": ["[CLS]", "…", "[SEP]"],
    }
    assert described["weights"] == {
        "files": ["model.safetensors"],
        "bytes": (folder / "model.safetensors").stat().st_size,
        "tensors": 37,
        "dtypes": {"F32": 37},
        "not_needed": [],
        "prefix": "",
    }


@pytest.mark.parametrize("write", [write_bert, write_roberta, write_distilbert, write_qwen3, write_pplx])
def test_a_folder_of_each_family_can_be_served(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    inspection = inspect(write(tmp_path))

    assert inspection.problems == []
    assert "This model can be served." in inspection.to_text()


@pytest.mark.parametrize(
    ("max_seq_length", "model_max_length", "limit", "source"),
    [
        (24, 30, 24, "sentence_bert_config.json (max_seq_length)"),
        (None, 30, 30, "tokenizer_config.json (model_max_length)"),
        (None, 10**30, 48, "config.json (positions)"),
        (512, 30, 48, "config.json (positions)"),
    ],
)
def test_the_file_that_limits_the_length_is_named(
    tmp_path: Path, max_seq_length: int | None, model_max_length: int, limit: int, source: str
) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    write_json(folder / "tokenizer_config.json", {"model_max_length": model_max_length})

    assert inspect(folder).facts["length"] == {"max_tokens": limit, "max_tokens_from": source}


def test_a_limit_that_special_tokens_alone_fill_is_a_problem(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 2})

    assert inspect(folder).problems == [
        f"{folder}/tokenizer.json: its 2 special tokens alone fill the 2 that a text may have."
    ]


def test_all_that_is_wrong_is_listed_each_once(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 99})
    (folder / "tokenizer.json").write_text("{}")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{QUERY}s"] = tensors.pop(QUERY)
    tensors["embeddings.LayerNorm.bias"] = torch.zeros(3)
    tensors["embeddings.LayerNorm.weight"] = torch.zeros(32, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")

    problems = [problem.removeprefix(f"{folder}/") for problem in inspect(folder).problems]

    assert problems[0] == "1_Pooling/config.json: word_embedding_dimension: 99, but the model is 32 wide."
    assert problems[1].startswith("tokenizer.json: not a tokenizer")
    assert problems[2:] == [
        "model.safetensors: tensor embeddings.LayerNorm.bias: shape [3], but the model needs [32].",
        "model.safetensors: tensor embeddings.LayerNorm.weight: dtype I8 is not supported; "
        "supported are F32, F16, BF16.",
        f"model.safetensors: does not fit the model. Missing tensors: {QUERY}. Unexpected tensors: {QUERY}s.",
    ]


def test_what_is_shown_to_people_is_a_row_a_fact_and_the_verdict(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Instruct: x\nQuery: "}})
    (folder / "model.safetensors").unlink()

    lines = inspect(folder).to_text().split("\n")

    assert lines[:2] == ["model               tiny", f"folder              {folder}"]
    assert "heads               4" in lines
    assert any(line.startswith("prompts ") and '"Instruct: x\\nQuery: "' in line for line in lines)
    assert lines[-2] == "This model is refused:"
    assert lines[-1].startswith(f"  {folder}/model.safetensors is missing")


def test_a_size_that_no_memory_holds_is_told_without_asking_for_memory(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    edit_json(folder / "config.json", vocab_size=2**31 - 1)

    assert "needs [2147483647, 32]" in inspect(folder).problems[0]


# --- the command ---


def hedgerow_inspect(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from common.deploy.cli import main; sys.exit(main())", "inspect"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_the_command_ends_with_0_for_a_model_that_can_be_served(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "tiny")

    ended = hedgerow_inspect(str(folder), "--json")

    assert (ended.returncode, ended.stderr, ended.stdout.count("\n")) == (0, "", 1)
    assert json.loads(ended.stdout)["name"] == "tiny"


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_ends_with_78_for_a_model_that_is_refused(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "tiny")
    edit_json(folder / "config.json", hidden_act="nothing")

    ended = hedgerow_inspect(str(folder))

    assert (ended.returncode, ended.stderr) == (78, "")
    assert f"{folder}/config.json: hidden_act: 'nothing' is not supported" in ended.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hub_id_is_found_in_the_local_cache_and_nothing_is_downloaded(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--tiny"
    folder = write_bert(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)

    found = hedgerow_inspect("some/tiny", "--json", HF_HOME=str(tmp_path))
    missing = hedgerow_inspect("some/other", HF_HOME=str(tmp_path))

    assert found.returncode == 0
    assert (json.loads(found.stdout)["name"], json.loads(found.stdout)["folder"]) == ("some/tiny", str(folder))
    assert missing.returncode == 1
    assert "Only models on this disk can be inspected." in missing.stderr


@pytest.mark.slow
def test_what_is_wrong_in_the_json_is_said_without_loading_torch(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    edit_json(folder / "config.json", architectures=["Unknown"])
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from worker.process.inspection import Inspection\n"
        "print(Inspection.of('x', Path(sys.argv[1])).problems[0], 'torch' in sys.modules)\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert "config.json: architectures: Unknown is not supported" in ended.stdout
    assert ended.stdout.endswith(" False\n")
