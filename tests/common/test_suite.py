"""What `hedgerow serve` settles and refuses before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import ServeConfig
from common.deploy import suite
from common.deploy.programs import SuiteModel
from common.errors import StartRefused
from common.model_location import ModelFolder
from common.run_dir import RunDir
from tests.suite import run_hedgerow


@pytest.mark.parametrize(
    ("cpus", "weight_bytes", "flags", "workers"),
    [
        (4, 90_000_000, {}, 4),
        (64, 90_000_000, {}, 8),
        (4, 500_000_000, {}, 2),
        (4, 2_400_000_000, {}, 1),
        (4, 0, {}, 4),
        (4, 90_000_000, {"threads": "2"}, 2),
        (4, 90_000_000, {"threads": "8"}, 1),
        (4, 90_000_000, {"workers": "3"}, 3),
    ],
)
def test_on_a_cpu_there_are_as_many_workers_as_cores_and_copies_of_the_weights_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    weight_bytes: int,
    flags: dict[str, str],
    workers: int,
) -> None:
    monkeypatch.setattr("common.hardware.usable_cpus", lambda: cpus)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    config = ServeConfig(run_dir="unused", device="cpu", **flags)
    assert suite._num_workers(config, ModelFolder("m", tmp_path), 1) == workers


@pytest.mark.parametrize(("workers", "of_each"), [("3", 3), ("auto", 2)])
def test_on_a_cpu_each_model_has_as_many_workers_as_are_asked_for_or_its_part_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str, of_each: int
) -> None:
    monkeypatch.setattr("common.hardware.usable_cpus", lambda: 5)
    models = (f"A={tmp_path}", f"B={tmp_path}")
    served = suite._settle_models(ServeConfig(models=models, device="cpu", workers=workers))
    assert [(model.num_workers, model.devices) for model in served] == [(of_each, None), (of_each, None)]


def test_on_a_host_with_gpus_several_models_are_not_started_before_it_is_said_whose_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(StartRefused, match="as in --gpus A:0 B:1"):
        suite._settle_models(ServeConfig(models=("A=x", "B=y")))


def test_a_model_has_a_worker_on_each_of_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    models = (f"A={tmp_path}", f"B={tmp_path}")
    served = suite._settle_models(ServeConfig(run_dir="/run/x", models=models, gpus=("A:0,2", "B:1"), task="B:score"))
    folder = tmp_path.resolve()
    assert served == [
        SuiteModel("A", ModelFolder("A", folder), RunDir("/run/x/A"), "auto", 2, ["4", "7"]),
        SuiteModel("B", ModelFolder("B", folder), RunDir("/run/x/B"), "score", 1, ["5"]),
    ]


def test_an_address_that_supervisord_cannot_open_is_refused() -> None:
    with pytest.raises(StartRefused, match="IPv4"):
        suite._check_port("::1", 8080)


@pytest.mark.slow
def test_a_suite_whose_keys_others_can_read_is_not_started(run_dir: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("canary-7f3a\n")
    keys.chmod(0o640)
    ended = run_hedgerow("serve", "--run-dir", run_dir, HEDGEROW_API_KEYS_FILE=str(keys))
    assert ended.returncode == 78
    assert ended.stderr.startswith(f"hedgerow serve: --api-keys-file {keys} is open to others (mode 0640)")
    assert "canary" not in ended.stderr
