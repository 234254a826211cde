"""Buffers on the device and pinned ones on the host, each with one owner, and how much of the device the KV gets."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from service.core.types import Int32Array
from service.errors import ConfigError
from service.executor.cuda.device import Device, UInt64Array
from service.executor.kv_layout import KvLayout

_ALIGNMENT_BYTES: Final = 64


def placed(sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> tuple[dict[str, int], int]:
    """Byte offsets of arrays that lie one behind the other, by their lengths and types, and the bytes of all."""
    offsets, num_bytes = {}, 0
    for name, (length, dtype) in sizes.items():
        offsets[name] = num_bytes
        num_bytes += -(-length * np.dtype(dtype).itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, num_bytes


def addresses_of(starts: Sequence[int], places: Int32Array, stride_bytes: int) -> UInt64Array:
    """Of the same places behind each of `starts`: uint64[len(starts) * len(places)]."""
    offsets = places.astype(np.uint64) * np.uint64(stride_bytes)
    return (np.array(starts, np.uint64)[:, None] + offsets).reshape(-1)


class DeviceBuffer:
    """Device memory, freed by `close`."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.num_bytes = num_bytes
        self.address = device.allocate(num_bytes)

    def close(self) -> None:
        """Free it. Idempotent."""
        address, self.address = self.address, 0
        if address:
            self._device.free(address)


class PinnedBuffer:
    """Pinned host memory, freed by `close`; no view may be used after that."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._bytes = device.allocate_pinned(num_bytes)
        self._is_open = True

    def view(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset_bytes: int = 0) -> npt.NDArray[Any]:
        """An array over a part of it."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self._bytes[offset_bytes : offset_bytes + num_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Free it. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._device.free_pinned(self._bytes)


class DeviceKv:
    """The KV buffer: an allocation per layer, all zeros."""

    def __init__(self, device: Device, layout: KvLayout) -> None:
        """Raises ConfigError when the device has not so much memory."""
        self._device = device
        self.layout = layout
        self.block_bytes = layout.layer_bytes // layout.num_blocks  # of one layer
        self.addresses: list[int] = []  # where each layer begins
        with ExitStack() as undo:
            try:
                for _ in range(layout.num_layers):
                    buffer = undo.enter_context(closing(DeviceBuffer(device, layout.layer_bytes)))
                    self.addresses.append(buffer.address)
                    device.clear(buffer.address, layout.layer_bytes)
            except ConfigError as error:
                raise ConfigError(f"kv_memory: the device refuses {layout.total_bytes:,} bytes: {error}") from error
            self._owned = undo.pop_all()

    def copy_blocks(self, block_copies: Int32Array) -> None:
        """Copy blocks in every layer: int32[num_copies, 2], source and target; no target is a source too."""
        sources, targets = (self.block_addresses(blocks) for blocks in block_copies.T)
        self._device.copy_pieces(targets, sources, np.full_like(sources, self.block_bytes))

    def block_addresses(self, blocks: Int32Array) -> UInt64Array:
        """Where each of `blocks` begins in every layer: uint64[num_layers * len(blocks)], layer by layer."""
        return addresses_of(self.addresses, blocks, self.block_bytes)

    def close(self) -> None:
        """Free it. Idempotent."""
        self._owned.close()
