"""From a model's name to its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model_location import ModelNotFound, find_model


def test_a_folder_is_itself_and_named_after_its_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "bge-small"
    folder.mkdir()
    model = find_model(str(folder))
    assert (model.name, model.path) == ("bge-small", folder)


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"])
def test_a_packaged_model_is_found_by_any_of_its_names(name: str) -> None:
    model = find_model(name)
    assert model.name == "all-MiniLM-L6-v2"
    assert (model.path / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such", "no-such-model"])
def test_what_is_nowhere_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"folder|hub id"):
        find_model(name)
