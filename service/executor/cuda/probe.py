"""Whether this machine can serve on a GPU, asked without touching the CUDA packages, which may be missing too.

The driver library is probed with ctypes: cuda.bindings does not recover from a failed search for it, and may hang.
"""

import ctypes
from importlib.util import find_spec
from typing import Final

import onnxruntime as ort

from service.errors import ConfigError

CUDA_PROVIDER: Final = "CUDAExecutionProvider"
_DRIVER_LIBRARY: Final = "libcuda.so.1"


def require_cuda() -> None:
    """Raise ConfigError, with what is missing in one line, where no model can be served on a GPU."""
    require_driver()
    if CUDA_PROVIDER not in ort.get_available_providers():
        raise _refusal("this ONNX Runtime has no CUDA provider: install onnxruntime-gpu")


def require_driver() -> None:
    """Raise ConfigError, with what is missing in one line, where no kernel can be run on a GPU."""
    missing = _missing()
    if missing is not None:
        raise _refusal(missing)


def has_cuda_package() -> bool:
    """Whether the modules of this package that need cuda.bindings can be imported."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _refusal(missing: str) -> ConfigError:
    return ConfigError(f"device: cuda cannot be used: {missing}")


def _missing() -> str | None:
    """What keeps this machine from running kernels; None: nothing that can be told before trying."""
    try:
        library = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return f"no NVIDIA driver is installed: {_DRIVER_LIBRARY} is not found"
    code = library.cuInit(0)
    if code != 0:
        return f"the NVIDIA driver finds no usable GPU: cuInit reports error {code}"
    count = ctypes.c_int(0)
    code = library.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value < 1:
        return "the NVIDIA driver finds no GPU"
    if not has_cuda_package():
        return "the package cuda-python is not installed"
    return None
