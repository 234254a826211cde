"""A GPU through the CUDA driver: the thin owner of everything that cuda.bindings hands out.

Nothing here has run on a GPU yet.
"""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from service.errors import ConfigError, ExecutorError
from service.executor.cuda.device import NUM_MARKS, Provider, UInt8Array, UInt64Array
from service.executor.cuda.driver_calls import StreamCalls, driver_call
from service.executor.cuda.launch import CudaOps, LoadedKernel
from service.executor.cuda.probe import CUDA_PROVIDER, require_driver


class CudaDriver:
    """The first GPU with one stream, in ONNX Runtime's own context; a `Device`. Closed by its owner."""

    memory_name = "cuda"
    op_domain = "chairlift"

    def __init__(self, ops: CudaOps) -> None:
        """Raises ConfigError, naming what is missing, on a machine without a usable GPU."""
        require_driver()
        self.launch_address = ops.driver_launch()
        with ExitStack() as undo:
            try:
                self._open(undo)
            except ExecutorError as error:
                raise ConfigError(f"device: cuda cannot be used: {error}") from error
            self._owned = undo.pop_all()

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._stream)

    def providers(self, *, captures: bool) -> Sequence[Provider]:
        """The CUDA provider on this stream, which neither rounds to TF32 nor takes more memory than it needs."""
        options = {
            "device_id": "0",
            "user_compute_stream": str(self.stream),
            "enable_cuda_graph": "1" if captures else "0",
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "0",
        }
        return [(CUDA_PROVIDER, options)]

    def make_current(self) -> None:
        """Let the calling thread use the device."""
        driver_call(driver.cuCtxSetCurrent, self._context)

    def allocate(self, num_bytes: int) -> int:
        """Memory of its own, aligned to 256 bytes."""
        try:
            return int(driver_call(driver.cuMemAlloc, max(1, num_bytes)))
        except ExecutorError as error:
            raise ConfigError(f"{num_bytes:,} bytes of GPU memory are not free") from error

    def free(self, address: int) -> None:
        """Give back what `allocate` returned."""
        driver_call(driver.cuMemFree, address)

    def allocate_pinned(self, num_bytes: int) -> UInt8Array:
        """Page-locked memory."""
        try:
            address = int(driver_call(driver.cuMemHostAlloc, max(1, num_bytes), 0))
        except ExecutorError as error:
            raise ConfigError(f"{num_bytes:,} bytes of memory cannot be page-locked") from error
        pinned: UInt8Array = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
        return pinned

    def free_pinned(self, array: UInt8Array) -> None:
        """Give back what `allocate_pinned` returned."""
        driver_call(driver.cuMemFreeHost, array.ctypes.data)

    def free_bytes(self) -> int:
        """Device memory that nobody has taken, other processes included."""
        free, _ = driver_call(driver.cuMemGetInfo)
        return int(free)

    def blocks_per_sm(self, kernel: LoadedKernel) -> int:
        """Blocks of a kernel that one multiprocessor holds at a time."""
        arguments = (kernel.function, kernel.block_threads, kernel.shared_bytes)
        return int(driver_call(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor, *arguments))

    def copy_in(self, address: int, source: npt.NDArray[Any]) -> None:
        """Enqueue a copy to the device."""
        self._calls.copy_in(address, source.ctypes.data, source.nbytes)

    def copy_in_rows(self, address: int, stride_bytes: int, source: npt.NDArray[Any]) -> None:
        """Enqueue a copy of a matrix to rows on the device."""
        if not source.size:
            return
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.srcHost = source.ctypes.data
        copy.srcPitch = source.strides[0]
        copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice = address
        copy.dstPitch = stride_bytes
        copy.WidthInBytes = source.shape[1] * source.itemsize
        copy.Height = source.shape[0]
        self._calls.copy_matrix(copy.getPtr())

    def copy_out(self, target: npt.NDArray[Any], address: int) -> None:
        """Enqueue a copy from the device."""
        self._calls.copy_out(target.ctypes.data, address, target.nbytes)

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy on the device."""
        self._calls.copy_within(target, source, num_bytes)

    def copy_pieces(self, targets: UInt64Array, sources: UInt64Array, sizes: UInt64Array) -> None:
        """Enqueue copies of many pieces at once."""
        if len(sizes):
            self._calls.copy_batch(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes))

    def clear(self, address: int, num_bytes: int) -> None:
        """Enqueue filling with zeros."""
        self._calls.fill(address, 0, num_bytes)

    def mark(self, number: int) -> None:
        """Record an event."""
        self._calls.record(int(self._events[number]))

    def wait_for(self, number: int) -> None:
        """Block until the device has come to that mark, without keeping a processor busy."""
        driver_call(driver.cuEventSynchronize, self._events[number])

    def wait(self) -> None:
        """Block until all that was enqueued is done, without keeping a processor busy."""
        self.mark(NUM_MARKS)
        self.wait_for(NUM_MARKS)

    def close(self) -> None:
        """Release events, stream and context, whatever fails. Idempotent. Raises ExecutorError."""
        self._owned.close()

    def _open(self, undo: ExitStack) -> None:
        """Retain the context and make what is used in it; `undo` gets what gives each back."""
        device = driver_call(driver.cuDeviceGet, 0)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.num_sms = int(driver_call(driver.cuDeviceGetAttribute, attribute, device))
        # Waiting sleeps: spinning would keep a processor busy that the front side needs. ONNX Runtime, which waits for
        # the stream at the end of an eager run, does as the context says; events say it again.
        _, is_active = driver_call(driver.cuDevicePrimaryCtxGetState, device)
        if not is_active:  # a driver may refuse that for a context that somebody in this process has made already
            flags = driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC
            driver_call(driver.cuDevicePrimaryCtxSetFlags, device, flags)
        self._context = driver_call(driver.cuDevicePrimaryCtxRetain, device)
        undo.callback(driver_call, driver.cuDevicePrimaryCtxRelease, device)
        self.make_current()
        self._stream = driver_call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        undo.callback(driver_call, driver.cuStreamDestroy, self._stream)
        self._calls = StreamCalls(self.stream)
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING | driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC
        self._events = []  # of the marks, and one of `wait`'s own
        for _ in range(NUM_MARKS + 1):
            self._events.append(driver_call(driver.cuEventCreate, flags))
            undo.callback(driver_call, driver.cuEventDestroy, self._events[-1])
