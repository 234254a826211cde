"""A `Device` whose memory is the host's, for executors on simulated kernels, as late as a GPU may be.

What is enqueued happens when somebody waits: whoever changes a staged array too soon, or looks at a result too early,
sees it. Every buffer is an allocation of its own. `capacity_bytes` bounds what is allocated; `events` names what
reached the device, in order. Calls named in `broken` fail, as does allocation number `refused_allocation`, from 0.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from service.errors import ConfigError, ExecutorError
from service.executor.cuda.device import NUM_MARKS, Provider
from service.executor.cuda.launch import LoadedKernel


class HostDevice:
    memory_name = "cpu"
    op_domain = "chairlift.simulated"
    stream = 0
    num_sms = 4

    def __init__(self, launch_address: int, capacity_bytes: int = 64 << 20) -> None:
        self.launch_address = launch_address
        self.events: list[str] = []
        self.broken: set[str] = set()
        self.refused_allocation: int | None = None
        self.num_allocations = 0
        self.num_hidden_bytes = 0  # taken by others than `allocate`
        self.is_closed = False
        self._queue: deque[Callable[[], None]] = deque()
        self._marks_ahead: list[int] = []  # that have not been reached
        self._capacity_bytes = capacity_bytes
        self._arrays: dict[int, np.ndarray] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self.num_pieces = 0  # that `copy_pieces` was asked for

    def enqueue(self, event: str, action: Callable[[], None]) -> None:
        """Let `action` happen after all that was enqueued before."""
        assert not self.is_closed
        self._fail_if_broken(event)
        self.events.append(event)
        self._queue.append(action)

    def drain(self) -> None:
        """Let all that was enqueued happen."""
        assert not self.is_closed
        self._run_while(lambda: bool(self._queue))

    def mark(self, number: int) -> None:
        assert number < NUM_MARKS and number not in self._marks_ahead, "a step's mark was taken before it was reached"
        self.enqueue("mark", lambda: self._marks_ahead.remove(number))
        self._marks_ahead.append(number)

    def wait_for(self, number: int) -> None:
        self.events.append("wait")
        self._fail_if_broken("wait")
        self._run_while(lambda: number in self._marks_ahead)

    def wait(self) -> None:
        self.events.append("wait")
        self._fail_if_broken("wait")
        self.drain()

    def providers(self, *, captures: bool) -> Sequence[Provider]:
        return ["CPUExecutionProvider"]

    def make_current(self) -> None:
        assert not self.is_closed

    def allocate(self, num_bytes: int) -> int:
        self._count_allocation(num_bytes)
        if num_bytes > self.free_bytes():
            raise ConfigError(f"{num_bytes:,} bytes of memory are not free")
        # Not a number anywhere, in halves and in floats: what is read before it was written shows.
        padded = np.full(num_bytes + 64, 0xFF, np.uint8)
        start = -padded.ctypes.data % 64
        array = padded[start : start + num_bytes]
        self._arrays[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address: int) -> None:
        self._fail_if_broken("free")
        self.drain()  # cuMemFree waits, too
        self._arrays.pop(address)[:] = 0xFF

    def allocate_pinned(self, num_bytes: int) -> np.ndarray:
        self._count_allocation(num_bytes)
        array = np.zeros(num_bytes, np.uint8)
        self._pinned[array.ctypes.data] = array
        return array

    def free_pinned(self, array: np.ndarray) -> None:
        assert not self._queue, "pinned memory was freed while the device may use it"
        del self._pinned[array.ctypes.data]

    @property
    def is_idle(self) -> bool:
        """Whether all that was enqueued has happened."""
        return not self._queue

    @property
    def num_pinned(self) -> int:
        """Pinned buffers that nobody has freed."""
        return len(self._pinned)

    @property
    def num_buffers(self) -> int:
        """Buffers that nobody has freed, pinned ones included."""
        return len(self._arrays) + self.num_pinned

    def lose_everything(self) -> None:
        """Forget what a fault kept from being freed, as the end of a process does."""
        self._arrays.clear()

    def free_bytes(self) -> int:
        return self._capacity_bytes - self.num_hidden_bytes - sum(len(array) for array in self._arrays.values())

    def blocks_per_sm(self, kernel: LoadedKernel) -> int:
        return 3

    def copy_in(self, address: int, source: np.ndarray) -> None:
        self.enqueue("copy_in", lambda: self._write(address, source))

    def copy_in_rows(self, address: int, stride_bytes: int, source: np.ndarray) -> None:
        def copy() -> None:
            for row, values in enumerate(source):
                self._write(address + row * stride_bytes, values)

        self.enqueue("copy_in_rows", copy)

    def copy_out(self, target: np.ndarray, address: int) -> None:
        def copy() -> None:
            target.reshape(-1).view(np.uint8)[:] = self.bytes_at(address, target.nbytes)

        self.enqueue("copy_out", copy)

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        self.enqueue("copy_within", lambda: self._write(target, self.bytes_at(source, num_bytes)))

    def copy_pieces(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        """In another order than theirs, which is not promised."""
        pieces = np.stack([targets, sources, sizes], axis=1)[::-1].tolist()
        self.num_pieces += len(pieces)

        def copy() -> None:
            for target, source, num_bytes in pieces:
                self.bytes_at(target, num_bytes)[:] = self.bytes_at(source, num_bytes)

        self.enqueue("copy_pieces", copy)

    def clear(self, address: int, num_bytes: int) -> None:
        self.enqueue("clear", lambda: self.bytes_at(address, num_bytes).fill(0))

    def close(self) -> None:
        self.is_closed = True

    def bytes_at(self, address: int, num_bytes: int) -> np.ndarray:
        """A view of bytes of one allocation, pinned ones included."""
        arrays = self._arrays | self._pinned
        start = max(base for base in arrays if base <= address)
        array = arrays[start][address - start :][:num_bytes]
        assert len(array) == num_bytes, "beyond the end of a buffer"
        return array

    def _count_allocation(self, num_bytes: int) -> None:
        self.num_allocations += 1
        if self.num_allocations - 1 == self.refused_allocation:
            raise ConfigError(f"{num_bytes:,} bytes of memory are not free")

    def _run_while(self, is_on: Callable[[], bool]) -> None:
        """Let what was enqueued happen, in order. The first error is told when it has."""
        errors: list[ExecutorError] = []
        while is_on():
            try:
                self._queue.popleft()()
            except ExecutorError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _fail_if_broken(self, call: str) -> None:
        if call in self.broken:
            raise ExecutorError(f"{call} failed: CUDA error 700")

    def _write(self, address: int, source: np.ndarray) -> None:
        self.bytes_at(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)
