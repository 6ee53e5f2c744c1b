"""Starting: the wait after failed starts, the suite's supervisord.conf, what is refused before anything runs."""

from __future__ import annotations

import configparser
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from common.config import ServeConfig, to_environment
from common.deploy import launch
from common.model_location import ModelFolder
from common.wire.transport import prepare_run_dir
from tests.suite import ROOT
from tests.timing import assert_in_time


def run_hedgerow(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from common.deploy.launch import main; sys.exit(main())", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
    )


def test_the_wait_before_a_start_doubles_with_each_failed_one_and_is_bounded(run_dir: str) -> None:
    prepare_run_dir(run_dir)
    history = launch._StartHistory(run_dir, "worker-0")
    delays = [history.begin() for _ in range(9)]
    assert delays[0] == 0
    for delay, expected in zip(delays[1:], [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.8 * expected <= delay <= 1.2 * expected


def test_a_process_that_became_ready_starts_again_without_a_wait(run_dir: str) -> None:
    prepare_run_dir(run_dir)
    history = launch._StartHistory(run_dir, "worker-0")
    history.begin()
    history.clear()
    assert launch._StartHistory(run_dir, "worker-0").begin() == 0


def test_a_stop_ends_the_wait(run_dir: str) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    assert not launch._wait(30)
    assert_in_time(time.monotonic() - began, 5)


def test_the_suites_conf_holds_its_own_values_and_run_folder(run_dir: str) -> None:
    prepare_run_dir(run_dir)
    config = ServeConfig(run_dir=run_dir, port=9123, gateways=3, workers="2", drain_timeout_s=100)
    path = launch._write_supervisord_conf(run_dir, to_environment(config))
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read(path)
    assert parser["supervisord"]["environment"] == (
        'HEDGEROW_HOST="127.0.0.1",HEDGEROW_PORT="9123",HEDGEROW_GATEWAYS="3",HEDGEROW_WORKERS="2",'
        f'HEDGEROW_KEEP_AWAKE="0",HEDGEROW_RUN_DIR="{run_dir}"'
    )
    assert parser["supervisord"]["pidfile"] == f"{run_dir}/supervisord.pid"
    assert parser["unix_http_server"]["file"] == f"{run_dir}/supervisor.sock"
    assert parser["rpcinterface:hedgerow"]["supervisor.rpcinterface_factory"] == "common.deploy.supervision:plug_in"
    assert "inet_http_server" not in parser
    assert {parser[name]["stopwaitsecs"] for name in parser.sections() if "program:" in name} == {"105"}


@pytest.mark.parametrize(("keep_awake", "processes"), [(False, []), (True, ["awake"])])
def test_what_keeps_cores_awake_is_no_program_that_restart_all_could_start_unless_it_is_wanted(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, keep_awake: bool, processes: list[str]
) -> None:
    prepare_run_dir(run_dir)
    config = ServeConfig(run_dir=run_dir, workers="1", keep_awake=keep_awake)
    monkeypatch.setenv("HEDGEROW_KEEP_AWAKE", "true")  # the file's own value holds
    path = launch._write_supervisord_conf(run_dir, to_environment(config))
    options = ServerOptions()
    options.realize(["-n", "-c", str(path)])
    [awake] = [group for group in options.process_group_configs if group.name == "awake"]
    assert [process.name for process in awake.process_configs] == processes


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
    monkeypatch.setattr("common.config.usable_cpus", lambda: cpus)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    config = ServeConfig(run_dir="unused", device="cpu", **flags)
    assert launch._num_workers(config, ModelFolder("m", tmp_path)) == workers


def several(run_dir: str) -> list[launch._Served]:
    return [
        launch._Served(ModelFolder("A", Path("/models/a")), f"{run_dir}/A", "auto", 2, ["0", "GPU-6f"]),
        launch._Served(ModelFolder("b.2", Path("/models/b")), f"{run_dir}/b.2", "score", 1, None),
    ]


def test_of_several_models_each_has_programs_and_a_folder_of_its_own(run_dir: str) -> None:
    prepare_run_dir(run_dir)
    path = launch._write_supervisord_conf(run_dir, to_environment(ServeConfig(run_dir=run_dir)), several(run_dir))
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read(path)
    shipped = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    shipped.read(ROOT / "supervisord.conf")
    assert [name for name in parser.sections() if "program" in name] == [
        "program:scheduler-A",
        "program:scheduler-b.2",
        "program:worker-A",
        "program:worker-b.2",
        "fcgi-program:gateway",
        "program:awake",
    ]
    assert parser["program:scheduler-A"]["environment"] == (
        f'HEDGEROW_RUN_DIR="{run_dir}/A",HEDGEROW_MODEL="/models/a",HEDGEROW_SERVED_MODEL_NAME="A",HEDGEROW_TASK="auto",'
        'HEDGEROW_WORKERS="2",CUDA_VISIBLE_DEVICES="0,GPU-6f"'
    )
    assert parser["program:worker-A"]["environment"] == (
        f'HEDGEROW_RUN_DIR="{run_dir}/A",HEDGEROW_MODEL="/models/a",HEDGEROW_SERVED_MODEL_NAME="A",HEDGEROW_TASK="auto",'
        'CUDA_VISIBLE_DEVICES="0,GPU-6f",HEDGEROW_SLOT="%(process_num)d",OMP_WAIT_POLICY="passive",'
        'GLIBC_TUNABLES="glibc.malloc.hugetlb=1"'
    )
    assert [parser[f"program:worker-{name}"]["numprocs"] for name in ("A", "b.2")] == ["2", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in parser["program:worker-b.2"]["environment"]
    assert 'HEDGEROW_TASK="score"' in parser["program:worker-b.2"]["environment"]
    # All else is what it is for one model.
    for role, name in (("scheduler", "scheduler-b.2"), ("worker", "worker-b.2")):
        own, usual = dict(parser[f"program:{name}"]), dict(shipped[f"program:{role}"])
        for changed in ("environment", "numprocs"):
            own.pop(changed, None)
            usual.pop(changed, None)
        assert own == usual


def test_on_a_host_with_gpus_several_models_are_not_started_before_it_is_said_whose_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(launch.StartRefused, match="as in --gpus A:0 B:1"):
        launch._several(ServeConfig(models=("A=x", "B=y")))


def test_a_model_has_a_worker_on_each_of_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    models = (f"A={tmp_path}", f"B={tmp_path}")
    served = launch._several(ServeConfig(run_dir="/run/x", models=models, gpus=("A:0,2", "B:1"), task="B:score"))
    folder = tmp_path.resolve()
    assert served == [
        launch._Served(ModelFolder("A", folder), "/run/x/A", "auto", 2, ["4", "7"]),
        launch._Served(ModelFolder("B", folder), "/run/x/B", "score", 1, ["5"]),
    ]


@pytest.mark.parametrize(("workers", "of_each"), [("3", 3), ("auto", 2)])
def test_on_a_cpu_each_model_has_as_many_workers_as_are_asked_for_or_its_part_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str, of_each: int
) -> None:
    monkeypatch.setattr("common.config.usable_cpus", lambda: 5)
    models = (f"A={tmp_path}", f"B={tmp_path}")
    served = launch._several(ServeConfig(models=models, device="cpu", workers=workers))
    assert [(model.num_workers, model.devices) for model in served] == [(of_each, None), (of_each, None)]


def test_a_value_that_supervisord_cannot_take_is_refused() -> None:
    for value in ('a"b', "50%c", "a\nb"):
        with pytest.raises(launch.StartRefused, match="quotation mark"):
            launch._escaped(value)


@pytest.mark.slow
def test_help_names_the_commands_and_an_unknown_one_is_status_2() -> None:
    assert "serve [MODEL]" in run_hedgerow("--help").stdout
    unknown = run_hedgerow("sreve")
    assert (unknown.returncode, "serve [MODEL]" in unknown.stderr) == (2, True)


@pytest.mark.slow
def test_a_gateway_whose_port_is_taken_says_so(run_dir: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_hedgerow("gateway", "--port", str(port), "--run-dir", run_dir)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr


@pytest.mark.slow
def test_a_suite_whose_keys_others_can_read_is_not_started(run_dir: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("canary-7f3a\n")
    keys.chmod(0o640)
    ended = run_hedgerow("serve", "--run-dir", run_dir, HEDGEROW_API_KEYS_FILE=str(keys))
    assert ended.returncode == 78
    assert ended.stderr.startswith(f"hedgerow serve: --api-keys-file {keys} is open to others (mode 0640)")
    assert "canary" not in ended.stderr


def test_an_address_that_supervisord_cannot_open_is_refused() -> None:
    with pytest.raises(launch.StartRefused, match="IPv4"):
        launch._check_port("::1", 8080)


@pytest.mark.slow
def test_a_process_whose_log_nobody_reads_still_ends(run_dir: str) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "scheduler", "--run-dir", run_dir, "--log-level", "debug"], stderr=writer
    ) as process:
        end = time.monotonic() + 20
        while not Path(run_dir, "gateways.sock").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"x" * 65536)  # full
        except BlockingIOError:
            pass
        os.set_blocking(writer, True)
        process.terminate()
        assert process.wait(10) == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_a_hangup_opens_the_log_again_and_ends_nothing(run_dir: str) -> None:
    log = Path(f"{run_dir}-logs", "scheduler.log")
    command = [sys.executable, "-m", "scheduler", "--run-dir", run_dir, "--log-dir", str(log.parent)]
    with subprocess.Popen(command) as process:
        end = time.monotonic() + 20
        while not Path(run_dir, "gateways.sock").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        log.rename(log.with_name("old.log"))

        process.send_signal(signal.SIGHUP)

        while not log.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        process.terminate()
        assert process.wait(10) == 0
    assert "starting: " in log.with_name("old.log").read_text()
    assert log.read_text().endswith("stopped with status 0\n")


@pytest.mark.slow
def test_a_run_folder_that_is_too_long_for_a_socket_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    ended = run_hedgerow("scheduler", "--run-dir", str(tmp_path / ("x" * 120)))
    assert ended.returncode == 1
    assert "too long" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_process_dies_with_its_supervisor(run_dir: str) -> None:
    # A parent that starts a scheduler as supervisord would, and is killed.
    script = (
        "# supervisord\n"
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'scheduler', '--run-dir', {run_dir!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | {"SUPERVISOR_ENABLED": "1"}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    end = time.monotonic() + 20
    while not Path(run_dir, "gateways.sock").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.kill()
    parent.communicate()
    while _runs(child):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_process_whose_supervisor_is_gone_does_not_start(run_dir: str) -> None:
    # Its parent is this test: not a supervisor, as the init process is not that takes in orphans.
    ended = run_hedgerow("scheduler", "--run-dir", run_dir, SUPERVISOR_ENABLED="1")
    assert ended.returncode == 1
    assert not Path(run_dir, "gateways.sock").exists()


@pytest.mark.slow
def test_a_bug_in_a_running_process_is_logged_with_its_traceback(run_dir: str) -> None:
    script = (
        "from common.config import SchedulerConfig\n"
        "from common.deploy.launch import run_process\n"
        "def run(config, on_ready):\n"
        "    on_ready()\n"
        "    raise ValueError('a bug')\n"
        "run_process('scheduler', SchedulerConfig, run)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, "--run-dir", run_dir, "--log-dir", f"{run_dir}-logs"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    log = Path(f"{run_dir}-logs", "scheduler.log").read_text()
    assert "this process has failed" in log
    assert "ValueError: a bug" in log
    assert "cannot start" not in log


@pytest.mark.slow
def test_a_log_folder_that_cannot_be_written_to_is_one_line(run_dir: str) -> None:
    ended = run_hedgerow("scheduler", "--run-dir", run_dir, "--log-dir", "/proc/nolog")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "--log-dir" in ended.stderr


def test_starts_that_cannot_be_counted_wait_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "worker-0.starts").mkdir()  # neither readable nor writable as a file
    assert launch._StartHistory(str(tmp_path), "worker-0").begin() == 5


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
