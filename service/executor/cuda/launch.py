"""What the op library's CUDA ops launch: the C structures of graphs/ops/cuda_launch.h, and handing them over."""

import ctypes
from dataclasses import dataclass
from typing import Final

from service.errors import ConfigError, ExecutorError

FLOAT16: Final = 10  # ONNX element types of a model's activations
BFLOAT16: Final = 16


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel on the device, with what every launch of it takes."""

    function: int  # CUfunction
    block_threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels of one model's attention and what they were compiled for."""

    rope_kv_write: LoadedKernel
    attn_decode: LoadedKernel
    attn_prefill: LoadedKernel
    attn_combine: LoadedKernel
    scalar_type: int  # FLOAT16 or BFLOAT16
    head_dim: int
    block_size: int
    tile_tokens: int


class CudaKernelStruct(ctypes.Structure):
    """`CudaKernel`."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("block_threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
    )


class CudaStep(ctypes.Structure):
    """`CudaStep`. Keep it alive, at its address, while ops may launch by it."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint64),
        ("launch", ctypes.c_void_p),
        ("rope_kv_write", CudaKernelStruct),
        ("attn_decode", CudaKernelStruct),
        ("attn_prefill", CudaKernelStruct),
        ("attn_combine", CudaKernelStruct),
        ("range_begin", ctypes.c_void_p),
        ("part_begin", ctypes.c_void_p),
        ("decode_items", ctypes.c_void_p),
        ("num_prefill_items", ctypes.c_void_p),
        ("prefill_items", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("prefill_blocks", ctypes.c_int32),
        ("scalar_type", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )

    @classmethod
    def of(cls, launch: int, kernels: AttentionKernels) -> "CudaStep":
        """A step without a plan: `launch` is the address of a function of cuLaunchKernel's form."""
        step = cls(struct_bytes=ctypes.sizeof(cls), launch=launch)
        for name in ("rope_kv_write", "attn_decode", "attn_prefill", "attn_combine"):
            kernel: LoadedKernel = getattr(kernels, name)
            setattr(step, name, CudaKernelStruct(kernel.function, kernel.block_threads, kernel.shared_bytes))
        for name in ("scalar_type", "head_dim", "block_size"):
            setattr(step, name, getattr(kernels, name))
        return step


class CudaOps:
    """The op library's C functions for its CUDA ops. One thread uses them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._use = library.chairlift_cuda_use
        self._use.argtypes, self._use.restype = [ctypes.c_void_p], ctypes.c_int
        self._driver_launch = library.chairlift_cuda_driver_launch
        self._driver_launch.argtypes, self._driver_launch.restype = [], ctypes.c_void_p

    def use(self, step: CudaStep | None) -> None:
        """Make the ops of every session launch by `step`, which the caller keeps alive; None: not at all."""
        if self._use(None if step is None else ctypes.addressof(step)) != 0:
            raise ExecutorError("the op library was built from other sources than this package: build it again")

    def driver_launch(self) -> int:
        """The address of the driver's cuLaunchKernel. Raises ConfigError where there is no driver."""
        address: int | None = self._driver_launch()
        if not address:
            raise ConfigError("libcuda.so.1 has no cuLaunchKernel: no NVIDIA driver is installed")
        return address
