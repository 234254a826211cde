"""What the CUDA executor asks of a GPU. Two back ends: the driver, and host memory with simulated kernels in tests."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from service.executor.cuda.launch import LoadedKernel

NUM_MARKS: Final = 2
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
Provider = str | tuple[str, dict[str, str]]


class Device(Protocol):
    """A GPU with one stream, on which everything happens in order. Used by one thread at a time.

    Addresses are of device memory. Copies and clears only enqueue; host arrays must be pinned and stay as they are
    until that is waited for. Methods raise ExecutorError when the device reports an error.
    """

    @property
    def memory_name(self) -> str:
        """ONNX Runtime's name of the device's memory."""
        ...

    @property
    def op_domain(self) -> str:
        """The domain whose PagedAttention and SampleRows run on the device."""
        ...

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""
        ...

    @property
    def launch_address(self) -> int:
        """A function of cuLaunchKernel's form."""
        ...

    @property
    def stream(self) -> int:
        """The stream's handle."""
        ...

    def providers(self, *, captures: bool) -> Sequence[Provider]:
        """ONNX Runtime's execution providers for a session on this device and stream."""
        ...

    def make_current(self) -> None:
        """Let the calling thread use the device."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Memory of its own. Raises ConfigError when there is not so much."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` returned."""
        ...

    def allocate_pinned(self, num_bytes: int) -> UInt8Array:
        """Host memory that the device copies from and to by itself. Raises ConfigError when there is not so much."""
        ...

    def free_pinned(self, array: UInt8Array) -> None:
        """Give back what `allocate_pinned` returned; no view of it may be used again."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody has taken."""
        ...

    def blocks_per_sm(self, kernel: LoadedKernel) -> int:
        """Blocks of a kernel that one multiprocessor holds at a time."""
        ...

    def copy_in(self, address: int, source: npt.NDArray[Any]) -> None:
        """Copy a C-ordered pinned array to the device."""
        ...

    def copy_in_rows(self, address: int, stride_bytes: int, source: npt.NDArray[Any]) -> None:
        """Copy a C-ordered pinned matrix to rows on the device that begin `stride_bytes` apart."""
        ...

    def copy_out(self, target: npt.NDArray[Any], address: int) -> None:
        """Copy from the device to a C-ordered pinned array."""
        ...

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from device memory to device memory."""
        ...

    def copy_pieces(self, targets: UInt64Array, sources: UInt64Array, sizes: UInt64Array) -> None:
        """Copy many pieces, between device memory and pinned or within the device: uint64[n] addresses and bytes.

        They are copied in any order, so no piece is read or written by two. The arrays may change afterwards.
        """
        ...

    def clear(self, address: int, num_bytes: int) -> None:
        """Fill with zeros."""
        ...

    def mark(self, number: int) -> None:
        """Remember what has been enqueued so far under a number below NUM_MARKS, in place of what was there."""
        ...

    def wait_for(self, number: int) -> None:
        """Block until what was enqueued before that mark is done."""
        ...

    def wait(self) -> None:
        """Block until all that was enqueued is done."""
        ...

    def close(self) -> None:
        """Release the device. Idempotent."""
        ...
