"""Private names and message texts of other packages that the product reads. pyproject.toml bounds each package above.

A test fails where a release has changed one: then change what reads it (named in the failure), and raise the bound.
aiohttp, msgspec and orjson have theirs beside the gateway's tests.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import prometheus_client
import pytest
import torch
import zmq
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from supervisor.options import ServerOptions
from tokenizers import normalizers, pre_tokenizers

from tests.suite import ROOT

BOUNDED = {
    "prometheus-client",
    "pyzmq",
    "supervisor",
    "tokenizers",
    "torch",
    "flashinfer-python",
    "flash-attn-4",
}


def has(owner: object, name: str, package: str, reader: str) -> None:
    assert hasattr(owner, name), f"{package} {version(package)} has no {name} any more, which {reader} uses"


@pytest.mark.parametrize("package", sorted(BOUNDED))
def test_a_package_whose_private_names_are_read_has_an_upper_bound(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    [requirement] = [line for line in required if line.partition(">=")[0] == package]
    assert ",<" in requirement


@pytest.mark.parametrize("name", ["_upper_bounds", "_sum", "_buckets"])
def test_prometheus_clients_histogram_has_its_buckets_and_sum(name: str) -> None:
    histogram = Histogram("canary", "of a test", registry=CollectorRegistry(), buckets=(1.0, 2.0))
    has(histogram, name, "prometheus-client", "common/metrics.py, observe_all")
    assert list(histogram._upper_bounds) == [1.0, 2.0, float("inf")]


def test_prometheus_client_writes_a_files_length_first_and_reads_what_it_wrote(tmp_path: Path) -> None:
    reader = "common/metrics.py, _fold_dead_processes"
    for name in ("read_value", "write_value", "read_all_values_from_file", "close"):
        has(MmapedDict, name, "prometheus-client", reader)
    path = tmp_path / "counter_1.db"
    written = MmapedDict(str(path))
    written.write_value("key", 2.0, 3.0)
    assert written.read_value("key") == (2.0, 3.0)
    written.close()
    values = list(MmapedDict.read_all_values_from_file(str(path)))
    assert [value[:3] for value in values] == [("key", 2.0, 3.0)]
    used = int.from_bytes(path.read_bytes()[:4], "little")
    assert b"key" in path.read_bytes()[8:used]


def test_prometheus_client_merges_files_and_its_samples_can_be_changed(tmp_path: Path) -> None:
    has(MultiProcessCollector, "merge", "prometheus-client", "common/metrics.py, render")
    assert list(MultiProcessCollector.merge([])) == []
    sample = prometheus_client.samples.Sample("name", {}, 1.0)
    assert sample._replace(labels={"model": "A"}).labels == {"model": "A"}


def test_pyzmqs_compiled_socket_sends_a_frame_and_says_whether_more_come() -> None:
    has(zmq.backend.Socket, "send", "pyzmq", "common/wire/transport.py, _send")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://canary")
        other.connect("inproc://canary")
        zmq.backend.Socket.send(one, b"first", int(zmq.DONTWAIT | zmq.SNDMORE))
        zmq.backend.Socket.send(one, b"last", int(zmq.DONTWAIT))
        frames = [other.recv(int(zmq.DONTWAIT), copy=False) for _ in range(2)]
        assert [(frame.bytes, bool(frame.more)) for frame in frames] == [(b"first", True), (b"last", False)]
    context.term()


def test_supervisord_asks_its_loops_members_by_these_names() -> None:
    has(ServerOptions, "get_socket_map", "supervisor", "common/deploy/supervision.py, plug_in")
    source = Path(inspect.getfile(ServerOptions)).with_name("supervisord.py").read_text()
    for call in ("get_socket_map()", ".readable()", ".writable()", ".handle_read_event()", ".handle_error()"):
        assert call in source, f"supervisord does not call {call} any more; see common/deploy/supervision.py"
    assert "set_wakeup_fd" not in source, "supervisord sets a wakeup descriptor itself, in the place of the plugin's"


@pytest.mark.parametrize("make", [normalizers.Lowercase, pre_tokenizers.Whitespace])
def test_tokenizers_tells_the_fields_of_a_part_as_json(make: Callable[[], object]) -> None:
    state = make().__getstate__()  # type: ignore[attr-defined]
    told = "__getstate__ of a part of tokenizers is no JSON any more; worker/checkpoint/tokenizer.py, _components"
    assert json.loads(state)["type"] == make.__name__, told


def test_torch_names_its_allocator_where_a_host_has_no_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**55, dtype=torch.uint8)
    assert "DefaultCPUAllocator" in str(raised.value), "worker/engine/engine.py knows a lack of memory by this word"


@pytest.mark.gpu
def test_flashinfers_wrapper_has_the_buffers_and_the_plan_that_are_replaced_and_compared() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    import flashinfer.prefill

    reader = "worker/attention/flashinfer.py"
    has(flashinfer.prefill, "gen_batch_prefill_module", "flashinfer-python", reader)
    source = inspect.getsource(flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper)
    for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_plan_info"):
        assert f"self.{name}" in source, f"flashinfer-python's wrapper has no {name} any more, which {reader} uses"


@pytest.mark.gpu
def test_flash_attention_4s_forward_takes_the_arguments_that_are_passed() -> None:
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        pytest.skip("flash-attn-4 is not installed")
    interface = importlib.import_module("flash_attn.cute.interface")
    reader = "worker/attention/flash_attention_4.py"
    has(interface, "_flash_attn_fwd", "flash-attn-4", reader)
    taken = inspect.signature(interface._flash_attn_fwd).parameters
    missing = {"cu_seqlens_q", "cu_seqlens_k", "causal", "out"} - set(taken)
    assert not missing, f"flash-attn-4's _flash_attn_fwd takes no {missing} any more, which {reader} passes"
