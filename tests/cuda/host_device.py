"""A `Device` whose memory is the host's, for executors on simulated kernels: logs what was enqueued, and checks order.

Every buffer is an allocation of its own. `capacity_bytes` bounds what is allocated; `waits` counts waits, and `events`
names every call that reaches the device.
"""

from collections.abc import Sequence

import numpy as np

from service.errors import ConfigError
from service.executor.cuda.device import Provider
from service.executor.cuda.launch import LoadedKernel


class HostDevice:
    memory_name = "cpu"
    op_domain = "chairlift.simulated"
    stream = 0
    num_sms = 4

    def __init__(self, launch_address: int, capacity_bytes: int = 64 << 20) -> None:
        self.launch_address = launch_address
        self.events: list[str] = []
        self.num_waits = 0
        self.is_closed = False
        self._capacity_bytes = capacity_bytes
        self._arrays: dict[int, np.ndarray] = {}
        self._num_pinned = 0

    def providers(self, *, captures: bool) -> Sequence[Provider]:
        return ["CPUExecutionProvider"]

    def make_current(self) -> None:
        assert not self.is_closed

    def allocate(self, num_bytes: int) -> int:
        if num_bytes > self.free_bytes():
            raise ConfigError(f"{num_bytes:,} bytes of memory are not free")
        # Not a number anywhere, in halves and in floats: what is read before it was written shows.
        padded = np.full(num_bytes + 64, 0xFF, np.uint8)
        start = -padded.ctypes.data % 64
        array = padded[start : start + num_bytes]
        self._arrays[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address: int) -> None:
        self._arrays.pop(address)[:] = 0xFF

    def allocate_pinned(self, num_bytes: int) -> np.ndarray:
        self._num_pinned += 1
        return np.zeros(num_bytes, np.uint8)

    def free_pinned(self, array: np.ndarray) -> None:
        self._num_pinned -= 1

    @property
    def num_buffers(self) -> int:
        """Buffers that nobody has freed, pinned ones included."""
        return len(self._arrays) + self._num_pinned

    def free_bytes(self) -> int:
        return self._capacity_bytes - sum(len(array) for array in self._arrays.values())

    def blocks_per_sm(self, kernel: LoadedKernel) -> int:
        return 3

    def copy_in(self, address: int, source: np.ndarray) -> None:
        self._enqueue("copy_in")
        self._at(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def copy_in_rows(self, address: int, stride_bytes: int, source: np.ndarray) -> None:
        self._enqueue("copy_in_rows")
        for row, values in enumerate(source):
            self._at(address + row * stride_bytes, values.nbytes)[:] = values.view(np.uint8)

    def copy_out(self, target: np.ndarray, address: int) -> None:
        self._enqueue("copy_out")
        target.reshape(-1).view(np.uint8)[:] = self._at(address, target.nbytes)

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        self._enqueue("copy_within")
        self._at(target, num_bytes)[:] = self._at(source, num_bytes)

    def clear(self, address: int, num_bytes: int) -> None:
        self._enqueue("clear")
        self._at(address, num_bytes)[:] = 0

    def wait(self) -> None:
        self._enqueue("wait")
        self.num_waits += 1

    def close(self) -> None:
        self.is_closed = True

    def _enqueue(self, event: str) -> None:
        assert not self.is_closed
        self.events.append(event)

    def _at(self, address: int, num_bytes: int) -> np.ndarray:
        """Bytes of one allocation."""
        start = max(base for base in self._arrays if base <= address)
        array = self._arrays[start][address - start :][:num_bytes]
        assert len(array) == num_bytes, "beyond the end of a buffer"
        return array
