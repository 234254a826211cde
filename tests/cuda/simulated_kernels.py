"""The real kernels behind the same face as NumpyKernels: compiled, translated, and run on the simulator."""

from pathlib import Path

from service.executor.cuda.assembly import model_kernels
from service.executor.cuda.kernels import (
    DEFAULT_SHARED_BYTES,
    Scalar,
    choose_prefill_shape,
    kernel_specs,
    source_folder,
)
from service.executor.cuda.launch import LoadedKernel
from service.executor.cuda.precision import Precision
from service.executor.kv_layout import KvDtype
from tests.cuda.kernel_builds import MACROS, MAX_SHARED_BYTES
from tests.cudasim.device import Launch, SimDevice
from tests.cudasim.nvrtc import ARCHITECTURE

FLOAT16 = Precision(Scalar.HALF, KvDtype.FLOAT16)


class SimulatedKernels:
    """Kernels for a model of `precision`. A fault that the simulator sees fails the launch; `failure` tells it."""

    def __init__(
        self,
        head_dim: int,
        block_size: int,
        tile_tokens: int = 64,
        seed: int = 0,
        precision: Precision = FLOAT16,
    ) -> None:
        self._device = SimDevice(seed=seed)
        self.launch_address = self._device.launch_pointer
        prefill = choose_prefill_shape(head_dim, precision.is_kv_fp8, MAX_SHARED_BYTES[ARCHITECTURE])
        config = precision.kernel_config(head_dim, block_size, tile_tokens, prefill)
        modules, loaded = {}, {}
        for spec in kernel_specs(config):
            if spec.source not in modules:
                options = tuple(f"-D{each}" for each in config.definitions if each.split("=")[0] in MACROS[spec.source])
                modules[spec.source] = self._device.load(Path(source_folder()) / spec.source, options)
            function = modules[spec.source].kernel(spec.name)
            if spec.shared_bytes > DEFAULT_SHARED_BYTES:
                self._device.set_max_shared_bytes(function, spec.shared_bytes)
            loaded[spec.name] = LoadedKernel(function, spec.block_threads, spec.shared_bytes)
        self.kernels = model_kernels(config, loaded)
        self.errors: list[BaseException] = []

    @property
    def failure(self) -> str:
        return self._device.failure

    def take_log(self) -> list[Launch]:
        """The launches since the last call."""
        taken, self._device.launches = self._device.launches, []
        return taken

    def close(self) -> None:
        self._device.close()
