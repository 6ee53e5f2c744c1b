"""What supervisord is told to run: as supervisord.conf says it, with a suite's own values and models."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from common.config import ServeConfig, to_environment
from common.deploy import programs
from common.deploy.programs import SuiteModel, supervisord_conf
from common.errors import StartRefused
from common.model_location import ModelFolder
from common.run_dir import RunDir
from tests.suite import ROOT


def one_model(run_dir: str, **changes: object) -> SuiteModel:
    values = {"name": None, "folder": ModelFolder("m", Path("/models/m")), "run_dir": RunDir(run_dir)}
    return SuiteModel(**values | {"task": "auto", "num_workers": 1, "devices": None} | changes)


def parse(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read_string(text)
    return parser


def shipped(run_dir: str) -> configparser.RawConfigParser:
    """supervisord.conf as supervisord understands it, in this run folder."""
    text = (ROOT / "supervisord.conf").read_text().replace("%(here)s/run", run_dir)
    for variable in parse(text)["supervisord"]["environment"].split(","):
        name, _, value = variable.partition("=")
        text = text.replace(f"%(ENV_{name})s", value.strip('"'))
    return parse(text)


def test_the_default_suite_is_what_the_shipped_supervisord_conf_says(run_dir: str) -> None:
    config = ServeConfig(run_dir=run_dir, workers="1")

    ours = parse(supervisord_conf(to_environment(config), [one_model(run_dir)]))

    theirs = shipped(run_dir)
    assert ours.sections() == theirs.sections()
    for section in theirs.sections():
        assert dict(ours[section]) == dict(theirs[section]), section


def test_the_suites_conf_holds_its_own_values_and_run_folder(run_dir: str) -> None:
    config = ServeConfig(run_dir=run_dir, port=9123, gateways=3, workers="2", drain_timeout_s=100)
    parser = parse(supervisord_conf(to_environment(config), [one_model(run_dir)]))
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
    RunDir(run_dir).prepare()
    config = ServeConfig(run_dir=run_dir, workers="1", keep_awake=keep_awake)
    monkeypatch.setenv("HEDGEROW_KEEP_AWAKE", "true")  # the file's own value holds
    path = RunDir(run_dir).supervisord_conf
    path.write_text(supervisord_conf(to_environment(config), [one_model(run_dir)]))
    options = ServerOptions()
    options.realize(["-n", "-c", str(path)])
    [awake] = [group for group in options.process_group_configs if group.name == "awake"]
    assert [process.name for process in awake.process_configs] == processes


def several(run_dir: str) -> list[SuiteModel]:
    return [
        SuiteModel("A", ModelFolder("A", Path("/models/a")), RunDir(f"{run_dir}/A"), "auto", 2, ["0", "GPU-6f"]),
        SuiteModel("b.2", ModelFolder("b.2", Path("/models/b")), RunDir(f"{run_dir}/b.2"), "score", 1, None),
    ]


def test_of_several_models_each_has_programs_and_a_folder_of_its_own(run_dir: str) -> None:
    parser = parse(supervisord_conf(to_environment(ServeConfig(run_dir=run_dir)), several(run_dir)))
    usual_programs = shipped(run_dir)
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
        own, usual = dict(parser[f"program:{name}"]), dict(usual_programs[f"program:{role}"])
        for changed in ("environment", "numprocs"):
            own.pop(changed, None)
            usual.pop(changed, None)
        assert own == usual


def test_a_value_that_supervisord_cannot_take_is_refused() -> None:
    for value in ('a"b', "50%c", "a\nb"):
        with pytest.raises(StartRefused, match="quotation mark"):
            programs._escaped(value)
