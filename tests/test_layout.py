"""The house rules that a program can check: who imports whom, who may read the environment, what is never called."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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


# The wings of a package, from the top floor to the ground: none imports what is above it.
FLOORS = {"worker": ("process", "engine", "models", "attention", "kernels", "batch", "checkpoint")}


def import_graph() -> dict[str, set[str]]:
    """What each product module imports of the others, anywhere in it: for types alone and within functions, too."""
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                # Of `from package import name`, the module of that name if there is one, else the package.
                found.update(
                    full if (full := f"{node.module}.{alias.name}") in names else str(node.module)
                    for alias in node.names
                )
        graph[name] = found & set(names) - {name}
    return graph


def test_no_imports_go_in_a_circle() -> None:
    graph = import_graph()
    # Take away what imports nothing and what nothing imports, until only circles and the ways between them are left.
    while ends := {name for name in graph if not graph[name] or name not in set().union(*graph.values())}:
        graph = {name: found - ends for name, found in graph.items() if name not in ends}

    assert graph == {}


@pytest.mark.parametrize("package", FLOORS)
def test_no_import_goes_up(package: str) -> None:
    floors = FLOORS[package]
    arrows = {
        tuple(name.split(".")[1] for name in (module, other))
        for module, found in import_graph().items()
        for other in found
        if all(name.startswith(f"{package}.") and not name.endswith("__main__") for name in (module, other))
    }

    assert {wing for arrow in arrows for wing in arrow} == set(floors), "each wing has its floor"
    assert {(wing, other) for wing, other in arrows if floors.index(wing) > floors.index(other)} == set()


# What may be longer than the others. Its file's header says why.
LONG = {"worker/kernels/linear.py", "Metrics.__init__"}


def test_no_file_class_or_function_is_too_long_to_read(module: Path, tree: ast.Module) -> None:
    def num_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        assert node.end_lineno is not None
        return node.end_lineno - node.lineno + 1

    def long_names(node: ast.AST, owner: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{owner}{child.name}"
                if num_lines(child) > (350 if isinstance(child, ast.ClassDef) else 60):
                    yield name
                yield from long_names(child, f"{name}.")

    num_file_lines = len((ROOT / module).read_text().splitlines())
    assert num_file_lines <= 550 or module.as_posix() in LONG
    if "kernel" not in module.as_posix() and module.name != "triton.py":  # a kernel is one function
        assert set(long_names(tree, "")) <= LONG


@pytest.fixture(params=MODULES, ids=str)
def module(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def test_a_package_imports_only_itself_and_common(module: Path, tree: ast.Module) -> None:
    allowed = {module.parts[0], "common"}
    assert imports(tree) & set(PACKAGES) <= allowed


# What each folder of `common` may import of the others; "" is its top.
BELOW = {"": set(), "wire": {""}, "text": {"", "wire"}, "deploy": {""}}


def folder_in_common(parts: tuple[str, ...]) -> str:
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else ""


def test_the_folders_of_common_import_each_other_in_one_direction(module: Path, tree: ast.Module) -> None:
    if module.parts[0] != "common":
        return
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used = {folder_in_common(tuple(name.split("."))) for name in modules if name.startswith("common.")}
    own = folder_in_common(module.parts)
    assert used - {own} <= BELOW[own]


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
        ("worker.process.server, common.deploy.process", {"aiohttp", "tokenizers", "uvloop"}),
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


def test_one_module_alone_reads_and_writes_the_environment(module: Path, tree: ast.Module) -> None:
    if module.as_posix() == "common/environment.py":
        return
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}), module


def test_every_module_says_what_it_is_for(tree: ast.Module) -> None:
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "base.py", "manager.py", "misc.py"])
def test_no_module_is_a_drawer(name: str) -> None:
    assert not [module for module in MODULES if module.name == name]


def test_the_top_level_is_what_it_is_meant_to_be() -> None:
    for name in ("pyproject.toml", "README.md", "supervisord.conf", "benchmarks", "tests", *PACKAGES):
        assert (ROOT / name).exists()
