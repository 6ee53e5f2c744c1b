"""Flags, environment, defaults: which wins, and what is refused."""

from __future__ import annotations

import os
import re

import pytest

from common.config import (
    GatewayConfig,
    SchedulerConfig,
    ServeConfig,
    WorkerConfig,
    describe,
    load,
    to_environment,
)


def test_defaults_are_used_where_nothing_is_said() -> None:
    config = load(GatewayConfig, [], {})
    assert (config.host, config.port, config.max_inputs) == ("127.0.0.1", 8080, 2048)


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_default() -> None:
    environ = {"HEDGEROW_PORT": "9000", "HEDGEROW_MAX_INPUTS": "7"}
    config = load(GatewayConfig, ["--port", "9001"], environ)
    assert (config.port, config.max_inputs) == (9001, 7)


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on"])
def test_a_switch_is_read_from_the_environment(text: str) -> None:
    assert load(GatewayConfig, [], {"HEDGEROW_AUTO_TRUNCATE": text}).auto_truncate


def test_a_switch_can_be_turned_off_by_its_flag() -> None:
    assert not load(GatewayConfig, ["--no-auto-truncate"], {"HEDGEROW_AUTO_TRUNCATE": "1"}).auto_truncate


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--prot", "1"], {}, "--prot"),
        (["--port", "x"], {}, "--port"),
        ([], {"HEDGEROW_PORT": "x"}, "HEDGEROW_PORT"),
        (["--max-inputs", "0"], {}, "--max-inputs"),
        ([], {"HEDGEROW_AUTO_TRUNCATE": "maybe"}, "HEDGEROW_AUTO_TRUNCATE"),
        (["--log-level", "loud"], {}, "--log-level"),
        ([], {"HEDGEROW_LOG_LEVEL": "loud"}, "HEDGEROW_LOG_LEVEL"),
        (["--cors-origins", "app.example.org"], {}, "--cors-origins"),
        (["--cors-origins", "https://app.example.org/"], {}, "--cors-origins"),
        (["--cors-origins", "https://App.example.org"], {}, "--cors-origins"),
        (["--cors-origins", "https://*.example.org"], {}, "--cors-origins"),
        (["--cors-origins", "https://app.example.org,*"], {}, "--cors-origins"),
        (["--cors-origins", "null"], {}, "--cors-origins"),
    ],
)
def test_what_is_wrong_is_named_and_ends_the_start(
    flags: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(GatewayConfig, flags, environ)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["", "*", "https://app.example.org", "http://localhost:3000, http://[::1]:8080", "chrome-extension://abc"]
)
def test_origins_are_taken_as_browsers_send_them(value: str) -> None:
    assert load(GatewayConfig, [f"--cors-origins={value}"], {}).cors_origins == value


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_a_number_or_auto_is_nothing_else(value: str) -> None:
    with pytest.raises(SystemExit):
        load(WorkerConfig, [f"--max-batch-tokens={value}"], {})


def test_serve_knows_the_flags_of_every_process() -> None:
    config = load(ServeConfig, ["some-model", "--max-queue-ms", "5", "--device", "cpu", "--workers", "2"], {})
    assert (config.model, config.max_queue_ms, config.device, config.workers) == ("some-model", 5, "cpu", "2")


def test_what_serve_was_told_reaches_each_process_through_the_environment() -> None:
    serve = load(ServeConfig, ["--port", "9001", "--workers", "3", "--auto-truncate", "--threads", "2"], {})
    environ = to_environment(serve)
    assert load(GatewayConfig, [], environ).auto_truncate
    assert load(SchedulerConfig, [], environ).workers == 3
    worker = load(WorkerConfig, [], environ)
    assert (worker.threads, worker.workers, worker.run_dir) == ("2", 3, serve.run_dir)


def test_suites_on_different_ports_have_different_run_folders() -> None:
    assert load(GatewayConfig, ["--port", "1"], {}).run_dir != load(GatewayConfig, ["--port", "2"], {}).run_dir


def test_describe_shows_every_value_on_one_line() -> None:
    line = describe(load(SchedulerConfig, ["--run-dir", "/x\ny"], {}))
    assert "\n" not in line
    assert "max_queue_ms='10000'" in line


def test_a_user_without_a_home_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    assert load(WorkerConfig, [], {}).cache_dir == "/nowhere/.cache/hedgerow"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))

    assert load(WorkerConfig, [], {}).cache_dir.endswith(f"hedgerow-cache-{os.getuid()}")


def test_each_flag_of_serve_stands_under_the_process_that_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(ServeConfig, ["--help"], {})
    _, serve, gateway, scheduler, worker, process = re.split(r"\n\w+ flags:\n", capsys.readouterr().out)
    assert "--gateways N" in serve
    assert "--workers VALUE" in serve
    assert "--max-inputs N" in gateway
    assert "--max-queue-ms N" in scheduler
    assert "--dtype" in worker
    assert "--workers" not in worker
    assert "--log-dir VALUE" in process
