"""The first GPU, through the product's own driver, kernels and cache. Not run on a GPU yet."""

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from cuda.bindings import driver

from service.errors import ExecutorError
from service.executor.cuda.compiler import CubinCache
from service.executor.cuda.driver import CudaDriver
from service.executor.cuda.driver_calls import driver_call
from service.executor.cuda.kernels import KernelConfig, load_kernels
from service.executor.cuda.kernels_driver import DriverModules
from service.executor.cuda.launch import CudaOps, LoadedKernel
from service.executor.op_library import OpLibrary
from tests.cuda.gpu_check.resources import KernelResources
from tests.cuda.gpu_check.versions import versions
from tests.cuda.launch_type import LAUNCH_TYPE

Enqueue = Callable[[int], None]
ATTRIBUTE = driver.CUdevice_attribute
DATA_SHEETS = {"H200": 4.8e12}  # bytes a second of the memory


class CudaModule:
    """A loaded cubin."""

    def __init__(self, modules: DriverModules, handle: int) -> None:
        self._modules, self._handle = modules, handle

    def kernel(self, name: str) -> int:
        return self._modules.function(self._handle, name)


class CudaDevice:
    """Launches and copies are in order on one stream; `copy_out` waits for them. Its owner closes it."""

    name = "cuda"

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError on a machine without a usable GPU."""
        self.folder = folder
        self.driver = CudaDriver(CudaOps(OpLibrary().functions))
        self.modules = DriverModules()
        self.cache = CubinCache(folder / "kernels")
        name: bytes = driver_call(driver.cuDeviceGetName, 64, driver_call(driver.cuDeviceGet, 0))
        self.card = name.split(b"\0")[0].decode()
        self.num_sms = self.driver.num_sms
        self.max_shared_bytes = self.modules.max_shared_bytes
        self.l2_bytes = self.attribute(ATTRIBUTE.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        self._launch = LAUNCH_TYPE(self.driver.launch_address)
        self._graphs: list[tuple[driver.CUgraph, driver.CUgraphExec]] = []
        self.load = cache(self._load)  # a module is loaded once
        self.kernels = cache(self._kernels)

    def close(self) -> None:
        while self._graphs:
            graph, executable = self._graphs.pop()
            driver_call(driver.cuGraphExecDestroy, executable)
            driver_call(driver.cuGraphDestroy, graph)
        self.modules.close()
        self.driver.close()

    def attribute(self, attribute: driver.CUdevice_attribute) -> int:
        return int(driver_call(driver.cuDeviceGetAttribute, attribute, driver_call(driver.cuDeviceGet, 0)))

    def describe(self) -> dict[str, str]:
        number = int(driver_call(driver.cuDriverGetVersion))
        card = f"{self.card}, {self.modules.architecture}, {self.num_sms} SMs, {self.free_bytes():,} bytes free"
        clock = self.attribute(ATTRIBUTE.CU_DEVICE_ATTRIBUTE_CLOCK_RATE) // 1000
        memory = (
            f"{self.l2_bytes >> 20} MiB of L2, at most {clock} MHz, data sheet {self.peak_bytes_per_s() / 1e9:.0f} GB/s"
        )
        said = Path("/proc/driver/nvidia/version")
        kernel_module = re.search(r"\d+\.\d+(\.\d+)?", said.read_text()) if said.is_file() else None
        text = f"{kernel_module[0] if kernel_module else 'not known'}, CUDA {number // 1000}.{number % 1000 // 10}"
        return {"card": card, "memory": memory, "driver": text, **versions()}

    def peak_bytes_per_s(self) -> float:
        """Of the data sheet; of cards not known here, by the memory's clock, two transfers a cycle, and its bus."""
        known = [rate for card, rate in DATA_SHEETS.items() if card in self.card]
        if known:
            return known[0]
        clock_hz = 1e3 * self.attribute(ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)
        return 2 * clock_hz * self.attribute(ATTRIBUTE.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def blocks_per_sm(self, kernel: LoadedKernel) -> int:
        return self.driver.blocks_per_sm(kernel)

    def _kernels(self, config: KernelConfig) -> Mapping[str, LoadedKernel]:
        """Every kernel of a model of `config`, as the product loads them."""
        return load_kernels(config, self.cache, self.modules)

    def resources(self, config: KernelConfig) -> list[KernelResources]:
        """As the loaded functions report them."""
        attribute = driver.CUfunction_attribute
        wanted = ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES")
        found = []
        for name, kernel in self.kernels(config).items():
            function = driver.CUfunction(kernel.function)
            registers, local, static = (
                int(driver_call(driver.cuFuncGetAttribute, attribute[f"CU_FUNC_ATTRIBUTE_{each}"], function))
                for each in wanted
            )
            block = (kernel.block_threads, static + kernel.shared_bytes, self.blocks_per_sm(kernel))
            found.append(KernelResources(name, registers, local, *block))
        return found

    def _load(self, source: Path, options: tuple[str, ...]) -> CudaModule:
        """`options` are like "-DHEAD_DIM=64"."""
        definitions = tuple(each.removeprefix("-D") for each in options)
        cubin = self.cache.cubin(source, self.modules.architecture, definitions)
        return CudaModule(self.modules, self.modules.load(cubin))

    def set_max_shared_bytes(self, kernel: int, num_bytes: int) -> None:
        self.modules.allow_shared_bytes(kernel, num_bytes)

    def allocate(self, num_bytes: int) -> int:
        return self.driver.allocate(num_bytes)

    def free(self, address: int) -> None:
        self.driver.free(address)

    def upload(self, array: np.ndarray) -> int:
        address = self.allocate(array.nbytes)
        self.copy_in(address, array)
        return address

    def copy_in(self, address: int, array: np.ndarray) -> None:
        self.driver.copy_in(address, array)
        self.wait()  # the array may be gone after this

    def copy_out(self, address: int, array: np.ndarray) -> None:
        self.driver.copy_out(array, address)
        self.wait()

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        self.driver.copy_within(target, source, num_bytes)

    def wait(self) -> None:
        self.driver.wait()

    def spin(self) -> None:
        """As `wait`, on a processor that does nothing else."""
        (code,) = driver.cuStreamQuery(self.driver.stream)
        while code == driver.CUresult.CUDA_ERROR_NOT_READY:
            (code,) = driver.cuStreamQuery(self.driver.stream)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise ExecutorError(f"cuStreamQuery failed: {code.name}")

    def launch(self, kernel, grid, block, shared_bytes, arguments) -> None:
        """Enqueue. Raises ExecutorError; a fault of the kernel shows in the next wait."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        code = self._launch(kernel, *grid, *block, shared_bytes, self.driver.stream, pointers, None)
        if code:
            raise ExecutorError(f"cuLaunchKernel failed: CUDA error {code}")

    def seconds(self, enqueue: Enqueue, num_calls: int) -> float:
        """Seconds of the stream for calls of `enqueue` with 0, 1, ..., divided by their number."""
        stream = driver.CUstream(self.driver.stream)
        with _event() as begin, _event() as end:
            driver_call(driver.cuEventRecord, begin, stream)
            for call in range(num_calls):
                enqueue(call)
            driver_call(driver.cuEventRecord, end, stream)
            driver_call(driver.cuEventSynchronize, end)
            return float(driver_call(driver.cuEventElapsedTime, begin, end)) / 1e3 / num_calls

    def capture(self, enqueue: Enqueue, num_calls: int) -> Callable[[], None]:
        """A function that enqueues a CUDA graph of calls of `enqueue` with 0, 1, ..., which only enqueue."""
        enqueue(0)  # a kernel may be loaded when it is first launched, which a capture does not allow

        def calls() -> None:
            for call in range(num_calls):
                enqueue(call)

        stream = driver.CUstream(self.driver.stream)
        self._graphs.append(capture_on(stream, calls))
        executable = self._graphs[-1][1]
        return lambda: driver_call(driver.cuGraphLaunch, executable, stream)


def capture_on(
    stream: driver.CUstream,
    enqueue: Callable[[], object],
    mode: driver.CUstreamCaptureMode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
) -> tuple[driver.CUgraph, driver.CUgraphExec]:
    """A graph of what `enqueue` puts on the stream, and what launches it; both are the caller's to destroy."""
    driver_call(driver.cuStreamBeginCapture, stream, mode)
    try:
        enqueue()
    except BaseException:
        driver.cuStreamEndCapture(stream)  # which fails too; the stream can be used again, and the cause is told
        raise
    graph = driver_call(driver.cuStreamEndCapture, stream)
    return graph, driver_call(driver.cuGraphInstantiate, graph, 0)


@contextmanager
def _event() -> Iterator[driver.CUevent]:
    event = driver_call(driver.cuEventCreate, 0)
    try:
        yield event
    finally:
        driver_call(driver.cuEventDestroy, event)
