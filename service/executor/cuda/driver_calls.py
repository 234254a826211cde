"""Calls of the CUDA driver: through cuda.bindings, and for what every step enqueues without it.

cuda.bindings releases the interpreter lock in every call. Taken back beside a busy thread, such as the one of asyncio,
it may cost what that thread takes until it is asked for the lock, and a step enqueues some ten copies and events. With
a double for the driver, on 2 cores beside busy coroutines and at the service's switch interval, ten calls of 5 us took
449 us on average where they released the lock and 53 where they kept it; of 2 us, 65 and 23.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

from cuda.bindings import driver

from service.errors import ExecutorError

_API_VERSION: Final = 13000  # of CUDA, whose forms of the functions are called
_HANDLE, _SIZE = ctypes.c_void_p, ctypes.c_size_t


def driver_call(function: Any, *arguments: object) -> Any:
    """What a driver function returns after its code: nothing, one value, or a tuple. Raises ExecutorError."""
    code, *values = function(*arguments)
    _require_success(function.__name__, code)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


class StreamCalls:
    """Functions that enqueue on a stream; each takes the driver's arguments but the stream, the last one.

    Addresses are numbers, and host memory is pinned. They raise ExecutorError. They keep the interpreter lock, so they
    must be short, all but `copy_batch`.
    """

    def __init__(self, stream: int) -> None:
        """The driver has been loaded and initialised. Raises ExecutorError when it lacks a function."""
        copy = (_HANDLE, _HANDLE, _SIZE)  # target, source, bytes
        self.copy_in = _function("cuMemcpyHtoDAsync", copy, stream)
        self.copy_out = _function("cuMemcpyDtoHAsync", copy, stream)
        self.copy_within = _function("cuMemcpyDtoDAsync", copy, stream)
        self.copy_matrix = _function("cuMemcpy2DAsync", (_HANDLE,), stream)  # a CUDA_MEMCPY2D
        self.fill = _function("cuMemsetD8Async", (_HANDLE, ctypes.c_ubyte, _SIZE), stream)
        self.record = _function("cuEventRecord", (_HANDLE,), stream)
        batch = (_HANDLE, _HANDLE, _HANDLE, _SIZE, _HANDLE, _HANDLE, _SIZE)
        self._copy_batch = _function("cuMemcpyBatchAsync", batch, stream, keeps_lock=False)
        self._in_order = driver.CUmemcpyAttributes()  # of a batch as a whole; its copies have none among themselves
        self._in_order.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def copy_batch(self, targets: int, sources: int, sizes: int, count: int) -> None:
        """`count` copies: at the addresses are uint64[count], which may change afterwards."""
        first = ctypes.c_size_t(0)  # from which copy on the attributes are true
        self._copy_batch(targets, sources, sizes, count, self._in_order.getPtr(), ctypes.addressof(first), 1)


def _function(name: str, argument_types: Sequence[Any], stream: int, *, keeps_lock: bool = True) -> Callable[..., None]:
    """A driver function that has `stream` as its last argument and raises ExecutorError instead of yielding a code."""
    address, _ = driver_call(driver.cuGetProcAddress, name.encode(), _API_VERSION, 0)
    if not address:
        raise ExecutorError(f"the NVIDIA driver has no {name}: it is older than CUDA {_API_VERSION // 1000}")
    make_type = ctypes.PYFUNCTYPE if keeps_lock else ctypes.CFUNCTYPE
    function = make_type(ctypes.c_int, *argument_types, _HANDLE)(int(address))

    def call(*arguments: object) -> None:
        if (code := function(*arguments, stream)) != 0:
            _require_success(name, driver.CUresult(code))

    return call


def _require_success(name: str, code: driver.CUresult) -> None:
    if code != driver.CUresult.CUDA_SUCCESS:
        raise ExecutorError(f"{name} failed: {code.name} ({int(code)})")
