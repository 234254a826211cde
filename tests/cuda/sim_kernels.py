"""The kernels of cuda/*.cu on the simulator: arrays in, arrays out."""

import ctypes
from dataclasses import dataclass

import numpy as np

from service.executor.cuda.kernels import DEFAULT_SHARED_BYTES, KernelConfig, kernel_specs, source_folder
from tests.cuda.kernel_builds import MACROS
from tests.cudasim.device import SimDevice


@dataclass(frozen=True)
class Out:
    """An array that the kernel writes: its contents go in and come back."""

    array: np.ndarray


class SimKernels:
    """Launches kernels of one configuration. Every buffer lives for one launch, each in memory of its own."""

    def __init__(self, config: KernelConfig, device: SimDevice) -> None:
        self._device = device
        self._specs = {spec.name: spec for spec in kernel_specs(config)}
        self._definitions = config.definitions
        self._modules = {}

    def launch(self, name, grid, *arguments):
        """Arguments: an array, an Out, None, an int or a float, in the kernel's order; `Out`s hold the result then."""
        spec = self._specs[name]
        kernel = self._module(spec.source).kernel(name)
        if spec.shared_bytes > DEFAULT_SHARED_BYTES:
            self._device.set_max_shared_bytes(kernel, spec.shared_bytes)
        addresses = {}
        for each in arguments:
            array = each.array if isinstance(each, Out) else each
            if isinstance(array, np.ndarray) and id(array) not in addresses:
                addresses[id(array)] = self._device.upload(_bytes(array))
        try:
            cells = [_cell(each, addresses) for each in arguments]
            self._device.launch(kernel, (*grid, 1), (spec.block_threads, 1, 1), spec.shared_bytes, cells)
            for each in arguments:
                if isinstance(each, Out):
                    self._device.copy_out(addresses[id(each.array)], _bytes(each.array))
        finally:
            for address in addresses.values():
                self._device.free(address)

    def _module(self, source):
        if source not in self._modules:
            wanted = MACROS[source]
            options = tuple(f"-D{each}" for each in self._definitions if each.split("=")[0] in wanted)
            self._modules[source] = self._device.load(source_folder() / source, options)
        return self._modules[source]


def _bytes(array):
    """A flat view of any contiguous array, also of types that ctypes does not know."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


def _cell(argument, addresses):
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, np.ndarray | Out):
        array = argument.array if isinstance(argument, Out) else argument
        return ctypes.c_void_p(addresses[id(array)])
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int32(argument)
