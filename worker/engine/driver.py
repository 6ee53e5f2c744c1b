"""Two calls of the CUDA driver without torch's own work around them.

Every step makes these calls. torch's `replay` releases the interpreter's lock, which another thread may then hold for
long, and so does torch's way to record an event. Here the lock is kept: each call queues work and returns after a
microsecond or, for a graph of 200 kernels, ten.

A third function needs no torch at all: it wakes a device while torch is still being imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_TORCH_LIBRARY = "libtorch_cuda.so"  # a torch for CPUs alone lacks it


class Driver:
    """Queues work on streams. Streams, graphs and events are integers, as torch gives them."""

    def __init__(self) -> None:
        """Raises OSError: there is no driver."""
        library = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter's lock
        self._launch_graph = library.cuGraphLaunch
        self._launch_graph.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._record = library.cuEventRecord
        self._record.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def launch_graph(self, graph: int, stream: int) -> None:
        """Replay an instantiated graph.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
            RuntimeError: the device has failed, now or in something that was queued before.
        """
        if error := self._launch_graph(graph, stream):
            raise self._error(error)

    def record(self, event: int, stream: int) -> None:
        """Record an event, which happens when all work on the stream so far has ended. Raises as `launch_graph`."""
        if error := self._record(event, stream):
            raise self._error(error)

    def _error(self, code: int) -> RuntimeError:
        name = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(name))
        import torch  # it has been imported by now

        message = f"CUDA error {code}: {(name.value or b'unknown').decode()}"
        return torch.OutOfMemoryError(message) if code == _OUT_OF_MEMORY else RuntimeError(message)


def wake(slot: int) -> None:
    """Let the driver initialise the device that a worker of this slot will use, if torch can use one.

    It takes up to a second, in which the caller's thread holds no lock. torch takes over the device's primary context
    that this makes, or reports itself what is wrong.
    """
    found = importlib.util.find_spec("torch")
    if (
        found is None
        or found.origin is None
        or not Path(found.origin).with_name("lib").joinpath(_TORCH_LIBRARY).exists()
    ):
        return
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if not library.cuDeviceGet(ctypes.byref(device), slot % count.value):
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
