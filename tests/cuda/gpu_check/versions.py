"""Versions of what takes part in a run."""

import platform
from importlib.metadata import PackageNotFoundError, version

from service.executor.cuda.compiler import nvrtc_version

PACKAGES = (
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-sanitizer-api",
    "nvidia-cublas",
    "torch",
    "triton",
    "flashinfer-python",
)


def versions() -> dict[str, str]:
    """By name; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "NVRTC": nvrtc_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
