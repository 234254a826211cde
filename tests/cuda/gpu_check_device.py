"""What the GPU check runs on: a GPU through the product's own driver, or the simulator, behind one face.

Both are what `SimKernels` launches on, so that the kernel tests' problems run on either.
"""

import ctypes
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from cuda.bindings import driver

from service.errors import ExecutorError
from service.executor.cuda.compiler import CubinCache, nvrtc_version
from service.executor.cuda.driver import CudaDriver, driver_call
from service.executor.cuda.kernels import KernelConfig, kernel_specs, load_kernels, source_folder
from service.executor.cuda.kernels_driver import DriverModules
from service.executor.cuda.launch import CudaOps, LoadedKernel
from service.executor.op_library import OpLibrary
from tests.cuda.kernel_builds import MACROS, compiled
from tests.cuda.launch_gate import LAUNCH_TYPE
from tests.cudasim.build import compiler_version, missing_tool
from tests.cudasim.device import SimDevice
from tests.cudasim.nvrtc import ARCHITECTURE

PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "nvidia-cuda-nvrtc")


class NotRunError(Exception):
    """Why a step cannot run on this device."""


class StepFailedError(Exception):
    """Why a step failed, with the rows that it has all the same."""

    def __init__(self, reason: str, rows: list[dict[str, object]]) -> None:
        super().__init__(reason)
        self.rows = rows


@dataclass(frozen=True)
class KernelResources:
    kernel: str
    registers: int
    local_bytes: int  # stack and spills of a thread
    blocks_per_sm: int | None  # None: the device has no multiprocessors


class SimCheckDevice(SimDevice):
    """The simulator, with what the check asks of a device besides launches."""

    name = "sim"

    def describe(self) -> dict[str, str]:
        return {"card": "simulator", "driver": compiler_version().splitlines()[0], **versions()}

    def resources(self, config: KernelConfig) -> list[KernelResources]:
        """Compiled as for a GPU, which nothing loads here, and again for the simulator, which loads it."""
        found = []
        for spec in kernel_specs(config):
            definitions = tuple(each for each in config.definitions if each.split("=")[0] in MACROS[spec.source])
            log = compiled(spec.source, ARCHITECTURE, definitions).log
            pattern = rf"function '{spec.name}'.*?(\d+) bytes stack.*?(\d+) bytes spill stores.*?Used (\d+) registers"
            match = re.search(pattern, log, re.DOTALL)
            assert match is not None, log
            options = tuple(f"-D{each}" for each in definitions)
            self.load(source_folder() / spec.source, options).kernel(spec.name)
            found.append(KernelResources(spec.name, int(match[3]), int(match[1]) + int(match[2]), None))
        return found


class CudaModule:
    """A loaded cubin."""

    def __init__(self, modules: DriverModules, handle: int) -> None:
        self._modules, self._handle = modules, handle

    def kernel(self, name: str) -> int:
        return self._modules.function(self._handle, name)


class CudaDevice:
    """The first GPU; not run on one yet. Its owner closes it.

    Launches and copies are in order on one stream; `copy_out` waits for them.
    """

    name = "cuda"

    def __init__(self, kernel_cache: Path) -> None:
        """Raises ConfigError on a machine without a usable GPU."""
        self.driver = CudaDriver(CudaOps(OpLibrary().functions))
        self.modules = DriverModules()
        self.cache = CubinCache(kernel_cache)
        self._launch = LAUNCH_TYPE(self.driver.launch_address)
        self._loaded: dict[tuple[Path, tuple[str, ...]], CudaModule] = {}

    def close(self) -> None:
        self.modules.close()
        self.driver.close()

    def describe(self) -> dict[str, str]:
        device = driver_call(driver.cuDeviceGet, 0)
        name = driver_call(driver.cuDeviceGetName, 64, device).split(b"\0")[0].decode()
        number = int(driver_call(driver.cuDriverGetVersion))
        card = (
            f"{name}, {self.modules.architecture}, {self.driver.num_sms} SMs, {self.driver.free_bytes():,} bytes free"
        )
        said = Path("/proc/driver/nvidia/version")
        kernel_module = re.search(r"\d+\.\d+(\.\d+)?", said.read_text()) if said.is_file() else None
        text = (
            f"{kernel_module[0] if kernel_module else 'version not known'}, CUDA {number // 1000}.{number % 1000 // 10}"
        )
        return {"card": card, "driver": text, **versions()}

    def kernels(self, config: KernelConfig) -> Mapping[str, LoadedKernel]:
        """Every kernel of a model of `config`, as the product loads them."""
        return load_kernels(config, self.cache, self.modules)

    def resources(self, config: KernelConfig) -> list[KernelResources]:
        """As the loaded functions report them."""
        attribute = driver.CUfunction_attribute
        wanted = (attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        found = []
        for name, kernel in self.kernels(config).items():
            function = driver.CUfunction(kernel.function)
            registers, local = (int(driver_call(driver.cuFuncGetAttribute, each, function)) for each in wanted)
            found.append(KernelResources(name, registers, local, self.driver.blocks_per_sm(kernel)))
        return found

    def load(self, source: Path, options: tuple[str, ...]) -> CudaModule:
        """`options` are like "-DHEAD_DIM=64"."""
        if (source, options) not in self._loaded:
            definitions = tuple(each.removeprefix("-D") for each in options)
            cubin = self.cache.cubin(source, self.modules.architecture, definitions)
            self._loaded[source, options] = CudaModule(self.modules, self.modules.load(cubin))
        return self._loaded[source, options]

    def set_max_shared_bytes(self, kernel: int, num_bytes: int) -> None:
        self.modules.allow_shared_bytes(kernel, num_bytes)

    def upload(self, array: np.ndarray) -> int:
        address = self.driver.allocate(array.nbytes)
        self.driver.copy_in(address, array)
        self.driver.wait()  # the array may be gone after this
        return address

    def free(self, address: int) -> None:
        self.driver.free(address)

    def copy_out(self, address: int, array: np.ndarray) -> None:
        self.driver.copy_out(array, address)
        self.driver.wait()

    def launch(self, kernel, grid, block, shared_bytes, arguments) -> None:
        """Enqueue. Raises ExecutorError; a fault of the kernel shows in the next wait."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        code = self._launch(kernel, *grid, *block, shared_bytes, self.driver.stream, pointers, None)
        if code:
            raise ExecutorError(f"cuLaunchKernel failed: CUDA error {code}")

    def seconds(self, enqueue: Callable[[int], None], num_calls: int) -> float:
        """Seconds of the stream for calls of `enqueue` with 0, 1, ..., divided by their number."""
        stream = driver.CUstream(self.driver.stream)
        begin, end = (driver_call(driver.cuEventCreate, 0) for _ in range(2))
        try:
            driver_call(driver.cuEventRecord, begin, stream)
            for call in range(num_calls):
                enqueue(call)
            driver_call(driver.cuEventRecord, end, stream)
            driver_call(driver.cuEventSynchronize, end)
            return float(driver_call(driver.cuEventElapsedTime, begin, end)) / 1e3 / num_calls
        finally:
            driver_call(driver.cuEventDestroy, begin)
            driver_call(driver.cuEventDestroy, end)


CheckDevice = SimCheckDevice | CudaDevice


@contextmanager
def open_device(name: str, folder: Path) -> Iterator[CheckDevice]:
    """The device called "sim" or "cuda", closed in the end. Raises NotRunError or ConfigError where there is none."""
    if name == "sim" and (missing := missing_tool()) is not None:
        raise NotRunError(missing)
    device = SimCheckDevice(seed=2) if name == "sim" else CudaDevice(folder / "kernels")
    try:
        yield device
    finally:
        device.close()


def versions() -> dict[str, str]:
    """Of what takes part, by name; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "NVRTC": nvrtc_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def as_row(config: KernelConfig, used: KernelResources) -> dict[str, object]:
    return {"configuration": " ".join(config.definitions), **asdict(used)}
