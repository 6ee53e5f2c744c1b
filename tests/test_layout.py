"""The house rules that a program can check: who imports whom, who may read the environment, what is never called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICES = ("gateway", "scheduler", "worker")
PACKAGES = ("common", *SERVICES)
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Where each third party is at home. A path ending in / is a folder.
HOMES = {
    "aiohttp": ("gateway/",),
    "orjson": ("gateway/",),
    "uvloop": ("gateway/",),
    "torch": ("worker/",),
    "safetensors": ("worker/",),
    "flashinfer": ("worker/",),
    "flash_attn": ("worker/",),
    "zmq": (
        "common/wire/transport.py",
        "gateway/client.py",
        "scheduler/server.py",
        "scheduler/sides.py",
        "worker/process/server.py",
    ),
    "msgpack": ("common/wire/codec.py",),
    "tokenizers": ("common/text/tokenization.py", "worker/"),
    "prometheus_client": ("common/metrics.py",),
    "huggingface_hub": ("common/model_location.py",),
    "argparse": ("common/config.py",),
}

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}


def imports(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.fixture(params=MODULES, ids=str)
def module(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def test_a_package_imports_only_itself_and_common(module: Path, tree: ast.Module) -> None:
    allowed = {module.parts[0], "common"}
    assert imports(tree) & set(PACKAGES) <= allowed


def test_third_parties_stay_in_their_home(module: Path, tree: ast.Module) -> None:
    for name in imports(tree) & set(HOMES):
        assert any(
            module.as_posix() == home or (home.endswith("/") and module.as_posix().startswith(home))
            for home in HOMES[name]
        ), f"{module} imports {name}, which is at home in {', '.join(HOMES[name])}"


# What takes long to import, and who can do without when it starts: a worker needs torch, but heeds signals before.
SLOW_TO_IMPORT = {"torch", "transformers", "safetensors", "huggingface_hub", "supervisor", "triton", "flashinfer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "others"),
    [
        ("gateway.process", set()),
        ("scheduler.server", {"aiohttp", "tokenizers", "uvloop"}),
        ("worker.process.server, common.deploy.launch", {"aiohttp", "tokenizers", "uvloop"}),
    ],
)
def test_what_is_slow_to_import_is_not_in_the_way_of_a_start(modules: str, others: set[str]) -> None:
    code = f"import sys, {modules}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)

    assert not (SLOW_TO_IMPORT | others) & set(ended.stdout.split())


def test_nothing_is_unpickled_or_evaluated(tree: ast.Module) -> None:
    assert not imports(tree) & FORBIDDEN_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            assert (name if not isinstance(node.func, ast.Attribute) else "") not in FORBIDDEN_CALLS
            assert f"{owner}.{name}" not in {"torch.load", "pickle.loads", "yaml.load"}
            assert name not in {"recv_pyobj", "send_pyobj"}
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                assert (keyword.arg, value) not in {
                    ("shell", True),
                    ("allow_pickle", True),
                    ("trust_remote_code", True),
                }


# Of the wall clock there is one use: the date that OpenAI's list of models gives each.
WALL_CLOCK = {"time.time": {"gateway/app.py"}}
WALL_CLOCKS = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow"}


def test_no_duration_is_measured_by_a_clock_that_somebody_may_set(module: Path, tree: ast.Module) -> None:
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & WALL_CLOCKS
    assert used == {name for name, places in WALL_CLOCK.items() if str(module) in places}
    assert not imports(tree) & {"datetime"}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
    }
    assert imported <= {"monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns"}


def test_only_config_reads_the_environment(module: Path, tree: ast.Module) -> None:
    if module.as_posix() in {"common/config.py", "common/metrics.py", "common/deploy/launch.py"}:
        return  # metrics and launch only write it, for prometheus_client and supervisord: checked below
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}), module


def test_metrics_and_launch_write_the_environment_and_do_not_read_it() -> None:
    for path in ("common/metrics.py", "common/deploy/launch.py"):
        lines = [line.strip() for line in (ROOT / path).read_text().splitlines() if "environ" in line and "os." in line]
        assert all(
            line.startswith(("os.environ.update(", 'os.environ["PROMETHEUS_MULTIPROC_DIR"] =')) for line in lines
        )


def test_every_module_says_what_it_is_for(tree: ast.Module) -> None:
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "base.py", "manager.py", "misc.py"])
def test_no_module_is_a_drawer(name: str) -> None:
    assert not [module for module in MODULES if module.name == name]


def test_the_top_level_is_what_it_is_meant_to_be() -> None:
    for name in ("pyproject.toml", "README.md", "supervisord.conf", "benchmarks", "tests", *PACKAGES):
        assert (ROOT / name).exists()
