"""The kernels of cuda/*.cu: what each is compiled for, its block and shared memory, and how it comes to a device."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from service.errors import ConfigError, ExecutorError
from service.executor.cuda.compiler import CubinCache
from service.executor.cuda.launch import LoadedKernel

log = structlog.get_logger("chairlift.cuda")

DEFAULT_SHARED_BYTES: Final = 48 * 1024
"""What a block may have without asking."""

HEAD_DIMS: Final = (64, 96, 128, 256)
BLOCK_SIZES: Final = (16, 32)
_WARP: Final = 32
_DECODE_WARP_TOKENS: Final = 16  # of a tile
_DECODE_ROWS: Final = 16
_COMBINE_THREADS: Final = 512
_SAMPLE_THREADS: Final = 512
_RESERVED_BYTES: Final = 1024  # that the device adds to every block


class Scalar(enum.StrEnum):
    """Number types, by their names in the sources."""

    FLOAT = "float"
    BF16 = "bf16"
    HALF = "half"


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a block of attn_prefill takes. A warp has 16 or 32 of the rows: with 32, what it loads serves twice."""

    num_rows: int = 64  # packed rows of an item, as the plan has them
    num_warps: int = 4
    tile_tokens: int = 32


SMALLEST_PREFILL: Final = PrefillShape()


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """What a model's kernels are compiled for. Raises ConfigError when there is no kernel for it."""

    scalar: Scalar  # BF16 or HALF
    head_dim: int
    block_size: int
    tile_tokens: int  # of attn_decode, and of the plan
    logit: Scalar
    is_kv_fp8: bool = False
    prefill: PrefillShape = SMALLEST_PREFILL

    def __post_init__(self) -> None:
        """Check what the kernels can do."""
        if self.scalar is Scalar.FLOAT:
            raise ConfigError("CUDA attention has kernels for float16 and bfloat16 models only")
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim: {self.head_dim} has no CUDA kernels; there are some for {_listed(HEAD_DIMS)}")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"block_size: {self.block_size} has no CUDA kernels; there are some for {_listed(BLOCK_SIZES)}"
            )

    @property
    def definitions(self) -> tuple[str, ...]:
        """Macros for the compiler, of every source."""
        return (
            f"SCALAR={self.scalar}",
            f"HEAD_DIM={self.head_dim}",
            f"BLOCK_SIZE={self.block_size}",
            f"TILE_TOKENS={self.tile_tokens}",
            f"PREFILL_ROWS={self.prefill.num_rows}",
            f"PREFILL_WARPS={self.prefill.num_warps}",
            f"PREFILL_TILE_TOKENS={self.prefill.tile_tokens}",
            f"KV_FP8={int(self.is_kv_fp8)}",
            f"LOGIT={self.logit}",
        )


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of a configuration."""

    name: str
    source: str
    block_threads: int
    shared_bytes: int  # dynamic


def kernel_specs(config: KernelConfig) -> tuple[KernelSpec, ...]:
    """Every kernel that is launched. cuda/README.md describes them."""
    tile, prefill = config.tile_tokens, config.prefill
    decode_bytes = attention_shared_bytes(_DECODE_ROWS, config.head_dim, tile, config.is_kv_fp8)
    prefill_bytes = attention_shared_bytes(prefill.num_rows, config.head_dim, prefill.tile_tokens, config.is_kv_fp8)
    return (
        KernelSpec("rope_kv_write", "rope_kv_write.cu", 128, 16 * config.head_dim),
        KernelSpec("attn_decode", "attention.cu", _WARP * (tile // _DECODE_WARP_TOKENS), decode_bytes),
        KernelSpec("attn_prefill", "attention.cu", _WARP * prefill.num_warps, prefill_bytes),
        KernelSpec("attn_combine", "attention_combine.cu", _COMBINE_THREADS, 0),
        *(KernelSpec(name, "sample_rows.cu", _SAMPLE_THREADS, 0) for name in SAMPLE_KERNELS),
    )


SAMPLE_KERNELS: Final = ("sample_scan", "sample_count", "sample_draw")
"""One behind the other: all of them together sample rows."""

SLICE_LOGITS: Final = 8 * _SAMPLE_THREADS
"""Neighbouring logits that a block takes at a time."""

_SAMPLE_BINS: Final = 2048


def sample_workspace_words(num_rows: int, vocab_size: int, max_top: int) -> int:
    """Words of 4 bytes: RowWorkspace of sample_arguments.cuh for every row, what one kernel leaves to the next."""
    num_slices = -(-vocab_size // SLICE_LOGITS)
    return num_rows * (3 * _SAMPLE_BINS + 8 + num_slices * (6 + 2 * max_top))


def attention_shared_bytes(num_rows: int, head_dim: int, tile_tokens: int, is_kv_fp8: bool) -> int:
    """Queries of 16 bits, then two stages each of keys and values; rows are padded by 16 bytes."""
    kv_row_bytes = head_dim * (1 if is_kv_fp8 else 2) + 16
    return num_rows * (2 * head_dim + 16) + 4 * tile_tokens * kv_row_bytes


def choose_tile_tokens(head_dim: int, is_kv_fp8: bool, max_shared_bytes: int) -> int:
    """64 if two blocks of attn_decode then share a multiprocessor, else 32.

    `max_shared_bytes`: the most that a block may ask for, which is a multiprocessor's all but what is reserved a block.
    """
    return 64 if _fit(2, attention_shared_bytes(_DECODE_ROWS, head_dim, 64, is_kv_fp8), max_shared_bytes) else 32


_PREFILL_SHAPES: Final = (
    PrefillShape(128, 4, 64),
    PrefillShape(128, 4, 32),
    PrefillShape(64, 4, 64),
    SMALLEST_PREFILL,
    PrefillShape(128, 8, 32),
)
_PREFILL_RESIDENT_WARPS: Final = 8
_MAX_WIDE_HEAD_DIM: Final = 128  # of 32 rows a warp: more have no registers for their sums


def choose_prefill_shape(head_dim: int, is_kv_fp8: bool, max_shared_bytes: int) -> PrefillShape:
    """The first shape of which a multiprocessor holds eight warps, else the smallest.

    Raises ConfigError when not even that fits. `max_shared_bytes` as in `choose_tile_tokens`.
    """
    for shape in _PREFILL_SHAPES:
        num_bytes = attention_shared_bytes(shape.num_rows, head_dim, shape.tile_tokens, is_kv_fp8)
        num_blocks = _PREFILL_RESIDENT_WARPS // shape.num_warps
        if _has_registers(shape, head_dim, is_kv_fp8) and _fit(num_blocks, num_bytes, max_shared_bytes):
            return shape
    smallest = SMALLEST_PREFILL
    num_bytes = attention_shared_bytes(smallest.num_rows, head_dim, smallest.tile_tokens, is_kv_fp8)
    if num_bytes > max_shared_bytes:
        raise ConfigError(
            f"head_dim: attention with {head_dim} takes {num_bytes:,} bytes of shared memory a block, and the "
            f"device has {max_shared_bytes:,}"
        )
    return smallest


def _has_registers(shape: PrefillShape, head_dim: int, is_kv_fp8: bool) -> bool:
    if shape.num_rows == 16 * shape.num_warps:
        return True
    # e4m3 takes some for what it widens to; with the scores of 64 tokens nothing is left for that.
    is_too_much = is_kv_fp8 and head_dim == _MAX_WIDE_HEAD_DIM and shape.tile_tokens == 64
    return head_dim <= _MAX_WIDE_HEAD_DIM and not is_too_much


def _fit(num_blocks: int, num_bytes: int, max_shared_bytes: int) -> bool:
    """Whether a multiprocessor has the shared memory for as many blocks."""
    return num_blocks * (num_bytes + _RESERVED_BYTES) <= max_shared_bytes + _RESERVED_BYTES


def source_folder() -> Path:
    """Where the .cu files lie: beside this file in an installed package, else in the source tree."""
    installed = Path(__file__).parent / "sources"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "cuda"


class ModuleLoader(Protocol):
    """A device that takes cubins. Methods raise ExecutorError when the device refuses."""

    @property
    def architecture(self) -> str:
        """As in "sm_90"."""
        ...

    def load(self, cubin: bytes) -> int:
        """A module's handle."""
        ...

    def function(self, module: int, name: str) -> int:
        """A kernel's handle."""
        ...

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """Let a kernel have that much dynamic shared memory a block."""
        ...


def load_kernels(config: KernelConfig, cache: CubinCache, loader: ModuleLoader) -> Mapping[str, LoadedKernel]:
    """Every kernel by its name, ready to launch. Raises ConfigError or ExecutorError."""
    modules: dict[str, int] = {}
    kernels: dict[str, LoadedKernel] = {}
    for spec in kernel_specs(config):
        if spec.source not in modules:
            modules[spec.source] = _load_module(source_folder() / spec.source, config, cache, loader)
        function = loader.function(modules[spec.source], spec.name)
        if spec.shared_bytes > DEFAULT_SHARED_BYTES:
            loader.allow_shared_bytes(function, spec.shared_bytes)
        kernels[spec.name] = LoadedKernel(function, spec.block_threads, spec.shared_bytes)
    return kernels


def _load_module(source: Path, config: KernelConfig, cache: CubinCache, loader: ModuleLoader) -> int:
    """The module of a source, compiled unless the cache holds it in a form that the device takes."""
    kept = cache.kept(source, loader.architecture, config.definitions)
    if kept is not None:
        try:
            return loader.load(kept)
        except ExecutorError as error:
            log.warning("cuda.kept_kernels_refused", source=source.name, error=str(error))
    return loader.load(cache.compile(source, loader.architecture, config.definitions))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
