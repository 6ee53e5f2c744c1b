"""Two calls of the CUDA driver without what torch does around them.

torch's `replay` gives up the interpreter's lock, which another thread then holds for as long as it likes, and so does
what records an event. These calls are on every step's way. Here the lock is kept: each call queues work and returns,
after a microsecond or, for a graph of 200 kernels, ten.

And one that needs no torch: a device can be woken while torch is still being imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_TORCH_LIBRARY = "libtorch_cuda.so"  # of a torch that is not for CPUs alone


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
        """Have an event happen once all that the stream holds now has ended. Raises as `launch_graph`."""
        if error := self._record(event, stream):
            raise self._error(error)

    def _error(self, code: int) -> RuntimeError:
        name = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(name))
        import torch  # by now it is there

        message = f"CUDA error {code}: {(name.value or b'unknown').decode()}"
        return torch.OutOfMemoryError(message) if code == _OUT_OF_MEMORY else RuntimeError(message)


def wake(slot: int) -> None:
    """Have the driver begin with the device that a worker of this slot will use, where torch can use one.

    It takes up to a second, in which the caller's thread holds no lock. torch takes over what this has made (a device's
    primary context), or says itself what is wrong.
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
