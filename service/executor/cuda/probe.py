"""Whether this machine can serve on a GPU, asked without touching the CUDA packages, which may be missing too.

The driver library is probed with ctypes: cuda.bindings does not recover from a failed search for it, and may hang.
"""

import ctypes
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import onnxruntime as ort

from service.errors import ConfigError

CUDA_PROVIDER: Final = "CUDAExecutionProvider"
_DRIVER_LIBRARY: Final = "libcuda.so.1"
_MIN_CAPABILITY: Final = (8, 0)  # of cuda/*.cu
_MIN_DRIVER: Final = 13000  # CUDA 13.0: the forms that its functions have here, and what ONNX Runtime's wheel is for
_CAPABILITY_ATTRIBUTES: Final = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
PROVIDER_ARCHITECTURES: Final[Mapping[str, frozenset[str]]] = {
    "1.31.1": frozenset({"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"})
}
"""What the CUDA provider of an onnxruntime-gpu wheel has machine code for. It holds no PTX that would run elsewhere."""


def require_cuda() -> None:
    """Raise ConfigError, with what is missing in one line, where no model can be served on a GPU."""
    require_driver()
    if CUDA_PROVIDER not in ort.get_available_providers():
        raise _refusal("this ONNX Runtime has no CUDA provider: install onnxruntime-gpu")
    capability = _capability(ctypes.CDLL(_DRIVER_LIBRARY))
    if not provider_runs_on(capability, ort.__version__):
        raise _refusal(
            f"the GPU has compute capability {_dotted(capability)}, which onnxruntime-gpu {ort.__version__} has no "
            f"machine code for, only for {', '.join(sorted(PROVIDER_ARCHITECTURES[ort.__version__]))}"
        )


def provider_runs_on(capability: tuple[int, int], version: str) -> bool:
    """Whether ONNX Runtime's own kernels run there, as far as is known of that version.

    Machine code runs on its own capability and on later ones of the same major number; with an "a" on its own alone.
    """
    if version not in PROVIDER_ARCHITECTURES:
        return True
    for architecture in PROVIDER_ARCHITECTURES[version]:
        number = int(architecture.removeprefix("sm_").removesuffix("a"))
        built_for = divmod(number, 10)
        if built_for == capability:
            return True
        if not architecture.endswith("a") and built_for[0] == capability[0] and built_for < capability:
            return True
    return False


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
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < _MIN_DRIVER:
        found = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return f"the NVIDIA driver is for CUDA {found}, and 13.0 is needed: driver 580 or newer"
    count = ctypes.c_int(0)
    code = library.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value < 1:
        return "the NVIDIA driver finds no GPU"
    capability = _capability(library)
    if capability < _MIN_CAPABILITY:
        return f"the GPU has compute capability {_dotted(capability)}, and kernels take {_dotted(_MIN_CAPABILITY)}"
    if not has_cuda_package():
        return "the package cuda-python is not installed"
    return None


def _capability(library: ctypes.CDLL) -> tuple[int, int]:
    """The first GPU's, when the driver has been initialised."""
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    library.cuDeviceGet(ctypes.byref(device), 0)
    for value, attribute in zip((major, minor), _CAPABILITY_ATTRIBUTES, strict=True):
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return major.value, minor.value


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
