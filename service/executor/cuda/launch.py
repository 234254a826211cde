"""What the op library's CUDA ops launch, as graphs/ops/cuda_launch.h has it."""

import ctypes
import zlib
from dataclasses import dataclass
from typing import Final

from service.errors import ConfigError, ExecutorError

FLOAT16: Final = 10  # ONNX element types of a model's activations and KV buffer
BFLOAT16: Final = 16
FLOAT8E4M3FN: Final = 17  # of a KV buffer alone


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel on the device, with what every launch of it takes."""

    function: int  # CUfunction
    block_threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """The kernels of one model and what they were compiled for."""

    rope_kv_write: LoadedKernel
    attn_decode: LoadedKernel
    attn_prefill: LoadedKernel
    attn_combine: LoadedKernel
    sample_scan: LoadedKernel
    sample_count: LoadedKernel
    sample_draw: LoadedKernel
    scalar_type: int  # FLOAT16 or BFLOAT16
    kv_type: int  # the same, or FLOAT8E4M3FN
    head_dim: int
    block_size: int
    tile_tokens: int
    prefill_rows: int = 64


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
        ("struct_bytes", ctypes.c_uint32),
        ("layout", ctypes.c_uint32),
        ("launch", ctypes.c_void_p),
        ("rope_kv_write", CudaKernelStruct),
        ("attn_decode", CudaKernelStruct),
        ("attn_prefill", CudaKernelStruct),
        ("attn_combine", CudaKernelStruct),
        ("sample_scan", CudaKernelStruct),
        ("sample_count", CudaKernelStruct),
        ("sample_draw", CudaKernelStruct),
        ("range_begin", ctypes.c_void_p),
        ("num_merges", ctypes.c_void_p),
        ("merges", ctypes.c_void_p),
        ("decode_items", ctypes.c_void_p),
        ("num_prefill_items", ctypes.c_void_p),
        ("prefill_items", ctypes.c_void_p),
        ("penalties", ctypes.c_void_p),
        ("edit_indptr", ctypes.c_void_p),
        ("edit_tokens", ctypes.c_void_p),
        ("edit_counts", ctypes.c_void_p),
        ("edit_biases", ctypes.c_void_p),
        ("edit_logits", ctypes.c_void_p),
        ("num_logprobs", ctypes.c_void_p),
        ("logprob", ctypes.c_void_p),
        ("top_tokens", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("sample_workspace", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("prefill_blocks", ctypes.c_int32),
        ("merge_blocks", ctypes.c_int32),
        ("scalar_type", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("max_top", ctypes.c_int32),
        ("sample_blocks", ctypes.c_int32),
    )

    @classmethod
    def of(cls, launch: int, kernels: ModelKernels) -> "CudaStep":
        """A step without a plan and buffers: `launch` is the address of a function of cuLaunchKernel's form."""
        step = cls(struct_bytes=ctypes.sizeof(cls), layout=cls.layout_number(), launch=launch)
        for name, kind in cls._fields_:
            if kind is not CudaKernelStruct:
                continue
            kernel: LoadedKernel = getattr(kernels, name)
            setattr(step, name, CudaKernelStruct(kernel.function, kernel.block_threads, kernel.shared_bytes))
        for name in ("scalar_type", "kv_type", "head_dim", "block_size"):
            setattr(step, name, getattr(kernels, name))
        return step

    @classmethod
    def layout_number(cls) -> int:
        """`kCudaStepLayout`, of the fields here: a size alone does not tell of one that takes the place of padding."""
        fields = (*CudaKernelStruct._fields_, *cls._fields_)
        return zlib.crc32("\n".join(f"{field[0]} {ctypes.sizeof(field[1])}" for field in fields).encode())


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
