"""SimDevice: memory, modules and launches as a CUDA device has them, on the simulator."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from tests.cudasim.build import kernel_library, runtime_library

Dim3 = tuple[int, int, int]
Argument = Union["ctypes._SimpleCData[Any]", ctypes.Structure, np.generic]
"""One kernel argument of exactly the parameter's size; pointers are c_void_p or c_uint64 of an address."""


class SimError(Exception):
    """A launch that was refused, or a fault that the simulator saw. The message names the line of the .cu file."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch was called with, byte for byte. `arguments` holds all parameters one after another, no gaps."""

    kernel: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    arguments: bytes


class SimModule:
    """The kernels of one .cu file."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        names = ctypes.c_char.in_dll(library, "kernel_names")
        self.names = tuple(ctypes.string_at(ctypes.addressof(names)).decode().split())

    def kernel(self, name: str) -> int:
        """The handle that `launch` and `launch_pointer` take as their function. Raises KeyError."""
        if name not in self.names:
            raise KeyError(f"no kernel {name}; there are {', '.join(self.names)}")
        return ctypes.addressof(ctypes.c_char.in_dll(self._library, f"kernel_{name}"))


_Observer = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint8), ctypes.c_size_t
)


class SimDevice:
    """Addresses are host addresses. Sanitized flavours need a process that has their library loaded: see `sanitized`.

    One at a time and one launching thread: seed and recording belong to the newest device of the process. Seed 0 runs
    threads and blocks in order, any other number shuffles both. `sources`: a folder whose files are compiled instead of
    those of the same name.
    """

    def __init__(self, flavour: str = "plain", seed: int = 0, sources: Path | None = None) -> None:
        self._flavour = flavour
        self._sources = sources
        self._runtime = ctypes.CDLL(str(runtime_library(flavour)), mode=ctypes.RTLD_GLOBAL)
        self._runtime.sim_failure.restype = ctypes.c_char_p
        self._runtime.sim_allocate.restype = ctypes.c_void_p
        self._runtime.sim_allocate.argtypes = [ctypes.c_size_t]
        self._runtime.sim_free.argtypes = [ctypes.c_void_p]
        self._runtime.sim_set_max_shared_bytes.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        self._runtime.sim_launch.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        ]
        self._buffers: dict[int, int] = {}
        self.launches: list[Launch] = []
        """Every launch that was not refused, in order, those of C++ code included."""
        self._observer = _Observer(self._record)
        self._runtime.sim_set_observer(self._observer)
        self.set_seed(seed)
        self.set_max_branches(1 << 26)

    @property
    def launch_pointer(self) -> int:
        """Address of a function of cuLaunchKernel's signature, for code that launches without Python.

        After a result other than 0, `failure` says why.
        """
        pointer = ctypes.cast(self._runtime.sim_launch, ctypes.c_void_p).value
        assert pointer is not None
        return pointer

    @property
    def failure(self) -> str:
        """Why the last launch failed; empty if it did not."""
        return str(self._runtime.sim_failure().decode())

    def set_seed(self, seed: int) -> None:
        """The order of threads and blocks from the next launch on."""
        self._runtime.sim_set_seed(ctypes.c_uint64(seed))

    def set_max_branches(self, count: int) -> None:
        """Backward branches that one thread may take in a launch before it counts as spinning for ever."""
        self._runtime.sim_set_max_branches(ctypes.c_uint64(count))

    def allocate(self, num_bytes: int) -> int:
        """Memory of its own, aligned to 256 bytes, filled with ones: NaN in every float type."""
        address = self._runtime.sim_allocate(num_bytes)
        if not address:
            raise MemoryError(f"{num_bytes} bytes")
        self._buffers[int(address)] = num_bytes
        return int(address)

    def free(self, address: int) -> None:
        """Give back what `allocate` returned. Raises KeyError."""
        del self._buffers[address]
        self._runtime.sim_free(address)

    def close(self) -> None:
        """Free all buffers. The recorded launches stay."""
        for address in tuple(self._buffers):
            self.free(address)

    def copy_in(self, address: int, array: npt.NDArray[np.generic]) -> None:
        """Host to device."""
        contiguous = np.ascontiguousarray(array)
        self._check_span(address, contiguous.nbytes)
        ctypes.memmove(address, contiguous.ctypes.data, contiguous.nbytes)

    def copy_out(self, address: int, array: npt.NDArray[np.generic]) -> None:
        """Device to host, into a contiguous array."""
        if not array.flags.c_contiguous:
            raise ValueError("not contiguous")
        self._check_span(address, array.nbytes)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def upload(self, array: npt.NDArray[np.generic]) -> int:
        """Allocate a copy of an array."""
        address = self.allocate(array.nbytes)
        self.copy_in(address, array)
        return address

    def download(self, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """A copy of device memory."""
        array = np.empty(shape, dtype)
        self.copy_out(address, array)
        return array

    def load(self, source: Path, options: tuple[str, ...] = ()) -> SimModule:
        """Compile a .cu file, or take it from the cache. Raises CompileError, TranslationError, BuildError."""
        if self._sources:
            source = self._sources / source.name
        return SimModule(ctypes.CDLL(str(kernel_library(source, options, self._flavour))))

    def set_max_shared_bytes(self, kernel: int, num_bytes: int) -> None:
        """Allow a kernel more than 48 KB of dynamic shared memory, as cuFuncSetAttribute does."""
        if self._runtime.sim_set_max_shared_bytes(kernel, num_bytes):
            raise SimError(f"{num_bytes} bytes of shared memory are more than a block can have")

    def launch(self, kernel: int, grid: Dim3, block: Dim3, shared_bytes: int, arguments: Sequence[Argument]) -> None:
        """Run a kernel to its end. Raises SimError."""
        holders = [np.asarray(each) if isinstance(each, np.generic) else each for each in arguments]
        pointers = (ctypes.c_void_p * max(1, len(holders)))(
            *(each.ctypes.data if isinstance(each, np.ndarray) else ctypes.addressof(each) for each in holders)
        )
        if self._runtime.sim_launch(kernel, *grid, *block, shared_bytes, None, pointers, None):
            raise SimError(self.failure)

    def _record(self, kernel: bytes, dims: "ctypes._Pointer[ctypes.c_uint32]", parameters: object, count: int) -> None:
        sizes = [int(dims[i]) for i in range(7)]
        raw = b""
        if count:
            raw = ctypes.string_at(ctypes.cast(parameters, ctypes.c_void_p), count)  # type: ignore[arg-type]
        grid, block = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        self.launches.append(Launch(kernel.decode(), grid, block, sizes[6], raw))

    def _check_span(self, address: int, num_bytes: int) -> None:
        """A copy must stay within one buffer."""
        inside = any(start <= address and address + num_bytes <= start + size for start, size in self._buffers.items())
        if not inside:
            raise ValueError(f"{num_bytes} bytes at {address:#x} lie in no buffer")
