"""Copy bytes of MLX arrays on an NVIDIA GPU to the host and back, through the driver.

MLX shows such an array to the host by moving it to managed memory, whose pages then
fault over one by one: about 1 GB/s a thread. Copies between the array's own memory
and page-locked buffers run at the speed of the bus, 55 GB/s on an H200.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

#: Bytes of one page-locked buffer: enough to fill the bus, few enough to stay in cache.
STAGE = 1 << 22
#: Smaller arrays gain nothing from it; MLX keeps the smallest in memory of another kind.
LEAST = 1 << 12
#: ``CU_POINTER_ATTRIBUTE_MEMORY_TYPE`` and the type "device".
_MEMORY_TYPE, _DEVICE = 2, 2

_u64, _ptr, _size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [_ptr, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_ptr, ctypes.c_int],
    "cuCtxSetCurrent": [_ptr],
    "cuMemAllocHost_v2": [_ptr, _size],
    "cuMemcpyDtoH_v2": [_ptr, _u64, _size],
    "cuMemcpyHtoD_v2": [_u64, _ptr, _size],
    "cuPointerGetAttribute": [_ptr, ctypes.c_int, _u64],
}


class Device:
    """The GPU that MLX computes on.

    Raises:
        OSError: There is no driver, or one that lacks a function.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        try:
            for name, arguments in _SIGNATURES.items():
                getattr(self._driver, name).argtypes = arguments
        except AttributeError as exc:
            raise OSError(str(exc)) from None
        device, self._context = ctypes.c_int(), _ptr()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._free: SimpleQueue[Stage] = SimpleQueue()
        self._current = threading.local()
        self._kernel: Any = mx.fast.cuda_kernel(
            name="vkv_address",
            input_names=["x"],
            output_names=["out"],
            source="out[0] = (unsigned long long)x;",
        )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise OSError(f"{name}: CUDA error {code}")

    def _enter(self) -> None:
        """Make the driver's context current in this thread, once."""
        if not getattr(self._current, "set", False):
            self._call("cuCtxSetCurrent", self._context)
            self._current.set = True

    def address(self, x: mx.array) -> int:
        """Evaluate ``x``, a vector of uint8 that is not empty, and return its address.

        They must be held, and not be shown to the host, while the address is used.

        Raises:
            OSError: Not in memory that the driver copies from.
        """
        (out,) = self._kernel(
            inputs=[x],
            output_shapes=[(1,)],
            output_dtypes=[mx.uint64],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        pointer, kind = int(out.item()), ctypes.c_uint()
        self._enter()
        self._call("cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, pointer)
        if kind.value != _DEVICE:
            raise OSError(f"an array in memory of type {kind.value}, expected {_DEVICE}")
        return pointer

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        """Reserve a page-locked buffer of ``STAGE`` bytes for one thread, until the block exits."""
        self._enter()
        buffer = self._new() if self._free.empty() else self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)

    def _new(self) -> Stage:
        pointer = _ptr()
        self._call("cuMemAllocHost_v2", ctypes.byref(pointer), STAGE)
        assert pointer.value is not None
        return Stage(pointer.value)

    def to_host(self, stage: Stage, address: int, size: int) -> memoryview:
        """Copy ``size`` bytes from ``address`` on to ``stage``, and return them."""
        self._call("cuMemcpyDtoH_v2", stage.address, address, size)
        return stage.view[:size]

    def to_device(self, address: int, stage: Stage, size: int) -> None:
        """Copy the first ``size`` bytes of ``stage`` to ``address``."""
        self._call("cuMemcpyHtoD_v2", address, stage.address, size)


class Stage:
    """A page-locked buffer; it is kept for the life of the process."""

    def __init__(self, address: int):
        self.address = address
        self.view = memoryview((ctypes.c_char * STAGE).from_address(address)).cast("B")


class Bytes:
    """The bytes of an array on the GPU in row-major order, piece by piece.

    Made in the thread that made the array; any thread may go through it.
    """

    def __init__(self, device: Device, x: mx.array):
        self.nbytes, self._device = x.nbytes, device
        # Held: a view of an array that does not lie together is a copy.
        self._flat = mx.contiguous(x).reshape(-1).view(mx.uint8)
        mx.eval(self._flat)
        self._address = device.address(self._flat) if x.nbytes else 0

    def __iter__(self) -> Iterator[memoryview]:
        """Yield pieces, each valid until the next is asked for."""
        with self._device.stage() as stage:
            for at in range(0, self.nbytes, STAGE):
                size = min(STAGE, self.nbytes - at)
                yield self._device.to_host(stage, self._address + at, size)


def device() -> Device | None:
    """Return the NVIDIA GPU that MLX computes on, if its driver can be reached."""
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return _device() if on_gpu and hasattr(mx.fast, "cuda_kernel") else None


@cache
def _device() -> Device | None:
    try:
        return Device() if mx.cuda.is_available() else None
    except OSError:
        return None
