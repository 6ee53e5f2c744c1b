"""The run folder: who may enter it, its locks, and that no model takes one of its names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.errors import AddressInUse
from common.run_dir import RunDir, is_reserved


def test_a_second_process_of_one_place_is_refused_until_the_first_lets_go(run_dir: str) -> None:
    RunDir(run_dir).prepare()
    lock = RunDir(run_dir).lock("scheduler")
    with pytest.raises(AddressInUse, match="scheduler"):
        RunDir(run_dir).lock("scheduler")
    lock.close()
    RunDir(run_dir).lock("scheduler").close()


def test_the_run_folder_is_for_its_user_alone(run_dir: str) -> None:
    os.makedirs(run_dir, mode=0o755)
    RunDir(run_dir).prepare()
    assert Path(run_dir).stat().st_mode & 0o777 == 0o700


def test_a_run_folder_that_everybody_can_write_to_is_refused_and_left_alone(run_dir: str) -> None:
    Path(run_dir).mkdir()
    Path(run_dir).chmod(0o1777)
    with pytest.raises(PermissionError, match="everybody"):
        RunDir(run_dir).prepare()
    assert Path(run_dir).stat().st_mode & 0o7777 == 0o1777


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_run_folder_of_another_user_is_refused(run_dir: str) -> None:
    os.makedirs(run_dir)
    os.chown(run_dir, 65534, 65534)
    with pytest.raises(PermissionError, match="another user"):
        RunDir(run_dir).prepare()


def test_a_run_folder_whose_sockets_would_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        RunDir("/tmp/" + "x" * 120).address("workers")


def test_models_have_folders_of_their_own_and_one_without_a_name_has_all_of_it() -> None:
    suite = RunDir("/run/x")
    assert suite.model_dirs(["A", "b.2"]) == {"A": RunDir("/run/x/A"), "b.2": RunDir("/run/x/b.2")}
    assert suite.model_dirs([]) == {None: suite}


def test_no_model_is_called_as_what_the_run_folder_has_itself() -> None:
    folder = RunDir("/run/x")
    sockets = [Path(folder.address(side)) for side in ("gateways", "workers")]
    supervisord = [folder.supervisord_conf, folder.supervisord_pid, folder.supervisord_socket]
    for path in (folder.metrics, folder.budgets, folder.connections, folder.starts("worker-0"), *sockets, *supervisord):
        assert is_reserved(path.name)
    assert not is_reserved("metrics.v2")
