"""Cubins on a GPU, through the CUDA driver. Nothing here has run on a GPU yet.

The caller has made a context current: ONNX Runtime's, which is the device's primary one.
"""

from contextlib import ExitStack

from cuda.bindings import driver

from service.executor.cuda.driver_calls import driver_call
from service.executor.cuda.probe import require_driver


class DriverModules:
    """A `ModuleLoader` of the first device. Used by one thread at a time, in which the context is current.

    Its owner closes it when no kernel runs any more.
    """

    def __init__(self) -> None:
        """Raises ConfigError without a usable GPU."""
        require_driver()
        self._device = driver_call(driver.cuDeviceGet, 0)
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
        module = driver_call(driver.cuModuleLoadData, cubin)
        self._modules.callback(driver_call, driver.cuModuleUnload, module)
        return int(module)

    def function(self, module: int, name: str) -> int:
        """A kernel's handle."""
        return int(driver_call(driver.cuModuleGetFunction, driver.CUmodule(module), name.encode()))

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Let a kernel have that much dynamic shared memory a block."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver_call(driver.cuFuncSetAttribute, driver.CUfunction(function), attribute, num_bytes)

    def close(self) -> None:
        """Unload every module, whatever fails. Idempotent. Raises ExecutorError."""
        self._modules.close()

    def _attribute(self, attribute: driver.CUdevice_attribute) -> int:
        return int(driver_call(driver.cuDeviceGetAttribute, attribute, self._device))
