"""Cubins on a GPU, through the CUDA driver. Nothing here has run on a GPU yet.

The caller has made a context current: ONNX Runtime's, which is the device's primary one.
"""

import ctypes
from contextlib import ExitStack
from typing import Any, Final

from cuda.bindings import driver

from service.errors import ConfigError, ExecutorError

_LIBRARY: Final = "libcuda.so.1"


def require_driver() -> None:
    """Raises ConfigError where there is no driver.

    Asked with ctypes before any call of cuda.bindings or cuda.core: these may hang for ever after a first failure.
    """
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(f"{_LIBRARY} cannot be loaded: no NVIDIA driver is installed") from error


class DriverModules:
    """A `ModuleLoader` of device `ordinal`. Owned by the engine thread; closed when no kernel runs any more."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises ConfigError without a driver."""
        require_driver()
        _call(driver.cuInit, 0)
        self._device = _call(driver.cuDeviceGet, ordinal)
        self._modules = ExitStack()

    @property
    def architecture(self) -> str:
        """As in "sm_90"."""
        attribute = driver.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        return f"sm_{major}{minor}"

    @property
    def max_shared_bytes(self) -> int:
        """The most that a block may ask for."""
        return self._attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def load(self, cubin: bytes) -> int:
        """A module's handle."""
        module = _call(driver.cuModuleLoadData, cubin)
        self._modules.callback(_call, driver.cuModuleUnload, module)
        return int(module)

    def function(self, module: int, name: str) -> int:
        """A kernel's handle."""
        return int(_call(driver.cuModuleGetFunction, driver.CUmodule(module), name.encode()))

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Let a kernel have that much dynamic shared memory a block."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, driver.CUfunction(function), attribute, num_bytes)

    def close(self) -> None:
        """Unload every module, whatever fails. Idempotent. Raises ExecutorError."""
        self._modules.close()

    def _attribute(self, attribute: driver.CUdevice_attribute) -> int:
        return int(_call(driver.cuDeviceGetAttribute, attribute, self._device))


def _call(function: Any, *arguments: Any) -> Any:
    """What a driver function returns besides its status. Raises ExecutorError naming function and status."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ExecutorError(f"{function.__name__} failed: {status!r}")
    return results[0] if results else None
