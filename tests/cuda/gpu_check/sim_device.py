"""The simulator, with what the steps ask of a device besides launches.

It has what a GPU has in a size of its own, and tells wall-clock times, which say nothing of a GPU.
"""

import ctypes
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from service.executor.cuda.kernels import DEFAULT_SHARED_BYTES, KernelConfig, KernelSpec, kernel_specs, source_folder
from service.executor.cuda.launch import LoadedKernel
from tests.cuda.gpu_check.resources import KernelResources
from tests.cuda.gpu_check.versions import versions
from tests.cuda.kernel_builds import MACROS, MAX_SHARED_BYTES, compiled
from tests.cudasim.build import compiler_version
from tests.cudasim.device import SimDevice
from tests.cudasim.nvrtc import ARCHITECTURE

Enqueue = Callable[[int], None]


class SimCheckDevice(SimDevice):
    """Launches and copies are done when they return."""

    name = "sim"
    num_sms = 3
    l2_bytes = 1 << 16
    max_shared_bytes = MAX_SHARED_BYTES[ARCHITECTURE]

    def __init__(self, folder: Path) -> None:
        super().__init__(seed=2)
        self.folder = folder

    def describe(self) -> dict[str, str]:
        return {"card": "simulator", "driver": compiler_version().splitlines()[0], **versions()}

    def peak_bytes_per_s(self) -> float | None:
        return None

    def free_bytes(self) -> int:
        return 1 << 28

    def blocks_per_sm(self, _: LoadedKernel) -> int:
        return 8

    def resources(self, config: KernelConfig) -> list[KernelResources]:
        """Compiled as for a GPU, which nothing loads here."""
        found = []
        for spec in kernel_specs(config):
            log = compiled(spec.source, ARCHITECTURE, _definitions(spec, config)).log
            pattern = rf"function '{spec.name}'.*?(\d+) bytes stack.*?(\d+) bytes spill stores.*?Used (\d+) registers"
            match = re.search(pattern, log, re.DOTALL)
            assert match is not None, log
            local = int(match[1]) + int(match[2])
            found.append(KernelResources(spec.name, int(match[3]), local, spec.block_threads, spec.shared_bytes, None))
        return found

    def kernels(self, config: KernelConfig) -> Mapping[str, LoadedKernel]:
        loaded = {}
        for spec in kernel_specs(config):
            options = tuple(f"-D{each}" for each in _definitions(spec, config))
            function = self.load(source_folder() / spec.source, options).kernel(spec.name)
            if spec.shared_bytes > DEFAULT_SHARED_BYTES:
                self.set_max_shared_bytes(function, spec.shared_bytes)
            loaded[spec.name] = LoadedKernel(function, spec.block_threads, spec.shared_bytes)
        return loaded

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def wait(self) -> None:
        pass

    spin = wait

    def seconds(self, enqueue: Enqueue, num_calls: int) -> float:
        """Seconds for calls of `enqueue` with 0, 1, ..., divided by their number."""
        started = time.perf_counter()
        for call in range(num_calls):
            enqueue(call)
        return (time.perf_counter() - started) / num_calls

    def capture(self, enqueue: Enqueue, num_calls: int) -> Callable[[], None]:
        """A function that makes the calls again."""

        def replay() -> None:
            for call in range(num_calls):
                enqueue(call)

        return replay


def _definitions(spec: KernelSpec, config: KernelConfig) -> tuple[str, ...]:
    return tuple(each for each in config.definitions if each.split("=")[0] in MACROS[spec.source])
