"""The KV buffer's element type, shape and size.

One array per layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`: keys, then values; one head's tokens of one
block are one contiguous run. With int8, the last dimension is `head_dim + 4`: a run of `block_size * (head_dim + 4)`
bytes holds first the int8 values of its tokens, then one float32 scale per token. How a block's keys are ordered within
their run is the op's affair, and on a CPU not token by token (graphs/ops/paged_attention.h): outside, only whole blocks
may be moved.
"""

import enum
import math
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from graphs.manifest import ModelInfo
from service.core.types import Int32Array
from service.errors import ConfigError
from service.executor.buffers import HUGE_PAGE_BYTES, aligned_zeros

SCALE_BYTES: Final = 4
_MAX_SLOTS: Final = 2**31 - 1  # slots are int32
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class KvDtype(enum.StrEnum):
    """Element types of the KV buffer."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    BFLOAT16 = "bfloat16"  # on cuda
    FP8 = "fp8"  # e4m3, on cuda

    @classmethod
    def choose(cls, choice: str, weight_format: str) -> "KvDtype":
        """The type on a CPU named by `choice`; "auto" is float32 beside float32 weights, so that nothing rounds, else
        float16. Raises ConfigError for any other name.
        """
        if choice == "auto":
            return cls.FLOAT32 if weight_format == "float32" else cls.FLOAT16
        if choice not in CPU_KV_DTYPES:
            raise ConfigError(f"kv_dtype: {choice!r} does not run on cpu: one of auto, {', '.join(CPU_KV_DTYPES)}")
        return cls(choice)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES[self]


CPU_KV_DTYPES: Final = (KvDtype.FLOAT32, KvDtype.FLOAT16, KvDtype.INT8)
_ITEMSIZES: Final = {
    KvDtype.FLOAT32: 4,
    KvDtype.FLOAT16: 2,
    KvDtype.BFLOAT16: 2,
    KvDtype.INT8: 1,
    KvDtype.FP8: 1,
}


KvArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV buffer of one model."""

    dtype: KvDtype
    num_layers: int
    num_blocks: int  # the null block included
    num_kv_heads: int
    block_size: int
    head_dim: int

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one layer's array."""
        width = self.head_dim + (SCALE_BYTES if self.dtype is KvDtype.INT8 else 0)
        return (self.num_blocks, 2, self.num_kv_heads, self.block_size, width)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's array."""
        return math.prod(self.layer_shape) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' arrays."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token position takes over all layers."""
        return self.total_bytes // (self.num_blocks * self.block_size)


def parse_kv_memory(text: str, available_bytes: int, setting: str = "kv_memory") -> int:
    """Bytes for the KV buffer, or what else `setting` is of: "1073741824", "512MiB", "2GB", or a share of
    `available_bytes`: "0.5", "50%".

    A number without a unit is a share below 1, all of it at "1" and "1.0", and whole bytes above. Raises ConfigError
    for anything else, and for more bytes than are available.
    """
    number, unit = _number_and_unit(text, setting)
    if _is_share(number, unit):
        share = number / 100 if unit == "%" else number
        if share > 1:
            raise ConfigError(f"{setting}: {text!r} is more than the whole of free memory")
        return int(share * available_bytes)
    if not unit and "." in text:
        raise ConfigError(f"{setting}: {text!r}: a share must be at most 1, and bytes need a unit, as 1.5GiB")
    unit = unit.removesuffix("b")
    factor = _BINARY_UNITS[unit[0]] if unit.endswith("i") else _UNITS[unit]
    num_bytes = int(number * factor)
    if num_bytes > available_bytes:
        raise ConfigError(f"{setting}: {text!r} is more than the {available_bytes:,} bytes of free memory")
    return num_bytes


def is_share_of_memory(text: str, setting: str = "kv_memory") -> bool:
    """Whether `text`, as `parse_kv_memory` reads it, is other bytes whenever other memory is free; none at all are not.

    Raises ConfigError for what is neither bytes nor a share.
    """
    number, unit = _number_and_unit(text, setting)
    return number > 0 and _is_share(number, unit)


def _number_and_unit(text: str, setting: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b?)\s*", text, re.IGNORECASE)
    unit = match[2].lower() if match else ""
    if match is None or unit in {"i", "ib"}:
        raise ConfigError(f"{setting}: {text!r} is neither bytes (like 512MiB) nor a share of free memory (like 0.5)")
    return float(match[1]), unit


def _is_share(number: float, unit: str) -> bool:
    return unit == "%" or (not unit and number <= 1)


def fit_kv_layout(model: ModelInfo, dtype: KvDtype, block_size: int, kv_memory_bytes: int) -> KvLayout:
    """The layout with as many blocks as `kv_memory_bytes` hold.

    Raises ConfigError when the block size is no power of two, or when not even one block fits beside the null block.
    """
    if block_size < 1 or block_size & (block_size - 1):
        raise ConfigError(f"block_size: {block_size} is not a power of two")

    def layout(num_blocks: int) -> KvLayout:
        return KvLayout(dtype, model.num_layers, num_blocks, model.num_kv_heads, block_size, model.head_dim)

    block_bytes = layout(1).total_bytes
    num_blocks = min(kv_memory_bytes // block_bytes, _MAX_SLOTS // block_size)
    if num_blocks < 2:
        raise ConfigError(
            f"kv_memory: {kv_memory_bytes:,} bytes are too few: a block of {block_size} tokens takes {block_bytes:,} "
            f"bytes over {model.num_layers} layers ({dtype}), and at least 2 blocks are needed"
        )
    return layout(num_blocks)


def allocate_kv(layout: KvLayout, *, prefault: bool = False) -> list[KvArray]:
    """One array of zeros per layer, huge-page aligned. Memory is taken as blocks are written to, with `prefault` now.

    Raises ConfigError when the system does not even promise that much.
    """
    try:
        arrays = [aligned_zeros(layout.layer_shape, layout.dtype, HUGE_PAGE_BYTES) for _ in range(layout.num_layers)]
    except MemoryError as error:
        raise ConfigError(f"kv_memory: the system refuses {layout.total_bytes:,} bytes") from error
    if prefault:
        for array in arrays:
            array.fill(0)
    return arrays


def copy_blocks(arrays: list[KvArray], block_copies: Int32Array) -> None:
    """Copy blocks in every layer: int32[num_copies, 2], source and target; no target is a source too."""
    sources, targets = block_copies.T
    for array in arrays:
        array[targets] = array[sources]
