"""Pinned host memory below the KV buffer of a GPU, for blocks that the buffer has no room for."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from service.core.plan import StepPlan
from service.core.types import Int32Array
from service.errors import ConfigError, ExecutorError
from service.executor.cuda.device import Device, UInt64Array
from service.executor.cuda.memory import DeviceKv, PinnedBuffer, addresses_of
from service.executor.kv_layout import parse_kv_memory
from service.executor.machine import available_memory_bytes

_MEASURED_BLOCKS: Final = 64
_NUM_MEASUREMENTS: Final = 3


class HostKv:
    """Blocks in pinned host memory, `[num_layers, num_blocks, bytes]`, and the copies between them and the KV buffer.

    Copies are enqueued on the device's stream, between the steps: so one that reads a block comes before the step that
    overwrites it, and one that writes a block before the step that reads it. Those of one way are enqueued at once, in
    each layer one for every run of blocks that follow each other on both sides.
    """

    def __init__(self, device: Device, kv: DeviceKv, num_blocks: int) -> None:
        """Raises ConfigError when so much memory cannot be page-locked."""
        layout = kv.layout
        self.num_blocks = num_blocks
        self._device, self._kv = device, kv
        self._buffer = PinnedBuffer(device, num_blocks * layout.num_layers * kv.block_bytes)
        layers = self._buffer.view((layout.num_layers, num_blocks * kv.block_bytes), np.uint8)
        self._layers = [layer.ctypes.data for layer in layers]  # where each begins

    def copy(self, plan: StepPlan) -> None:
        """Enqueue the plan's copies to the host, and then those from there. The step is to be enqueued after them."""
        if len(plan.offload):
            self._copy_out(plan.offload)
        if len(plan.restore):
            self._copy_in(plan.restore[:, ::-1])

    def measure_block_ns(self) -> float:
        """Nanoseconds to copy one block, by the slower way, when it makes no run with others.

        For a KV buffer that holds nothing yet: blocks are copied out, and back to where they were.
        """
        blocks = np.arange(1, self._kv.layout.num_blocks, 2, dtype=np.int32)[:_MEASURED_BLOCKS]
        host_blocks = np.arange(0, self.num_blocks, 2, dtype=np.int32)[:_MEASURED_BLOCKS]
        count = min(len(blocks), len(host_blocks))
        copies = np.stack([blocks[:count], host_blocks[:count]], axis=1)
        try:
            # The first copy out also lets the host blocks hold what the device's do, before any is copied in.
            return max(self._shortest_ns(copy, copies) for copy in (self._copy_out, self._copy_in)) / count
        except ExecutorError:
            # What was enqueued may still use memory that is freed now.
            with suppress(ExecutorError):
                self._device.wait()
            raise

    def close(self) -> None:
        """Free it. Idempotent."""
        self._buffer.close()

    def _copy_out(self, copies: Int32Array) -> None:
        on_device, on_host, sizes = self._pieces(copies)
        self._device.copy_pieces(on_host, on_device, sizes)

    def _copy_in(self, copies: Int32Array) -> None:
        on_device, on_host, sizes = self._pieces(copies)
        self._device.copy_pieces(on_device, on_host, sizes)

    def _pieces(self, copies: Int32Array) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
        """What is copied: where each piece begins on the device and on the host, and its bytes."""
        blocks, host_blocks, counts = _runs(copies)
        block_bytes = self._kv.block_bytes
        sizes = np.tile(counts.astype(np.uint64) * np.uint64(block_bytes), len(self._layers))
        return self._kv.block_addresses(blocks), addresses_of(self._layers, host_blocks, block_bytes), sizes

    def _shortest_ns(self, copy: Callable[[Int32Array], None], copies: Int32Array) -> int:
        times_ns = []
        for _ in range(_NUM_MEASUREMENTS):
            started_ns = time.perf_counter_ns()
            copy(copies)
            self._device.wait()
            times_ns.append(time.perf_counter_ns() - started_ns)
        return min(times_ns)


def create_host_kv(device: Device, kv: DeviceKv, memory: str) -> HostKv | None:
    """As many blocks as `memory` holds, "4GiB" or a share of the host's free memory, say; None for none.

    Raises ConfigError, also when not one block fits.
    """
    num_bytes = parse_kv_memory(memory, available_memory_bytes(), "host_kv_memory")
    if not num_bytes:
        return None
    layout = kv.layout
    block_bytes = layout.total_bytes // layout.num_blocks
    if num_bytes < block_bytes:
        reason = f"a block of {layout.block_size} tokens takes {block_bytes:,}"
        raise ConfigError(f"host_kv_memory: {num_bytes:,} bytes are too few: {reason}")
    try:
        return HostKv(device, kv, num_bytes // block_bytes)
    except ConfigError as error:
        raise ConfigError(f"host_kv_memory: {error}") from error


def _runs(copies: Int32Array) -> tuple[Int32Array, Int32Array, npt.NDArray[np.int64]]:
    """The runs in `copies`, int32[n, 2] of (device block, host block): their first blocks, and how many each has.

    Each block comes once.
    """
    ordered = copies[np.argsort(copies[:, 0])]
    is_first = np.append(True, (np.diff(ordered, axis=0) != 1).any(axis=1))
    starts = np.flatnonzero(is_first)
    return ordered[starts, 0], ordered[starts, 1], np.diff(np.append(starts, len(ordered)))
