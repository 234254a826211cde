"""A GGUF file as a tensor source: memory-mapped, a tensor is read when asked for."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.constants import GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from graphs.errors import ExportError
from graphs.gguf_blocks import decode_blocks
from graphs.manifest import GGUF_MAGIC
from graphs.rope import Float32Array
from graphs.spec import ModelSpec
from graphs.spec_gguf import VOCABULARY_KEYS, spec_from_gguf
from graphs.tensors import BlockWeights, StoredNames, UInt8Array, check_shapes, require_finite

_MAX_LIST = 4096  # longer metadata lists are vocabularies, of which a ModelSpec needs VOCABULARY_KEYS alone
_DIVISORS_NAME = "rope_freqs.weight"
_TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "norm1": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "norm2": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_NAMES = StoredNames(_TOP_NAMES, "blk", _LAYER_NAMES, derived=re.compile(re.escape(_DIVISORS_NAME)))


def open_gguf(path: Path) -> GGUFReader:
    """Map a GGUF file and read its header. Raises ExportError when it is not one, or is cut short."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ExportError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ExportError(f"{path}: not a GGUF file: it starts with {magic!r}, not {GGUF_MAGIC!r}")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        # Reads past the end of the map come back short, and the reader trips over them in one of these ways.
        raise ExportError(f"{path}: truncated or damaged GGUF file ({path.stat().st_size} bytes): {error}") from error
    if reader.byte_order != "I":
        raise ExportError(f"{path}: GGUF of the other byte order is not known")
    return reader


class GgufSource:
    """Implements TensorSource. Holds the map open for as long as it lives. Raises ExportError when opened."""

    def __init__(self, path: Path) -> None:
        """Open `path`, describe the model, and check that every tensor is there with its shape."""
        self.path = path
        self.reader = open_gguf(path)
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self.reader.tensors}
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        try:
            self.spec: ModelSpec = spec_from_gguf(_metadata(self.reader), shapes, self._divisors(), path.stem)
            check_shapes(self.spec, shapes, _NAMES)
        except (ExportError, UnicodeDecodeError) as error:  # metadata strings are decoded when they are read
            raise ExportError(f"{path}: {error}") from error

    @property
    def dtype(self) -> None:
        """None: matrices are rounded, and vectors are float32 whatever the model was trained in."""
        return None

    def float32(self, name: str) -> Float32Array:
        """Yield the tensor as float32; the caller owns it. Raises ExportError."""
        tensor = self._tensors[self._file_name(name)]
        order = self._row_order(name)
        rows = tensor.data if order is None or tensor.data.ndim == 1 else tensor.data[order]
        try:
            values = _float32(rows, tensor)
        except ExportError as error:
            raise ExportError(f"{self.path}: {error}") from error
        if order is not None and values.ndim == 1:
            values = values[order]
        return require_finite(values, f"{self.path}: tensor {tensor.name}")

    def blocks(self, name: str) -> BlockWeights | None:
        """Yield the matrix on the file's own grid, or None when its type has none. Raises ExportError."""
        tensor = self._tensors[self._file_name(name)]
        if tensor.data.ndim != 2 or tensor.data.dtype != np.uint8:
            return None
        order = self._row_order(name)
        rows: UInt8Array = tensor.data if order is None else tensor.data[order]
        blocks = decode_blocks(rows, tensor.tensor_type)
        if blocks is not None:
            require_finite(blocks.scales, f"{self.path}: scales of tensor {tensor.name}")
            require_finite(blocks.offsets, f"{self.path}: offsets of tensor {tensor.name}")
        return blocks

    def _file_name(self, name: str) -> str:
        return _NAMES.stored(name, self.spec)

    def _divisors(self) -> tuple[float, ...] | None:
        tensor = self._tensors.get(_DIVISORS_NAME)
        return None if tensor is None else tuple(_float32(tensor.data, tensor).reshape(-1).tolist())

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """Yield the file's row for each row in half-split order, or None when the file's order is that already."""
        match name.removesuffix(".bias").split("."):
            case [_, _, "q"]:
                num_heads = self.spec.num_heads
            case [_, _, "k"]:
                num_heads = self.spec.num_kv_heads
            case _:
                return None
        # Files of this architecture hold the rows that rotate together side by side: 0, r/2, 1, r/2 + 1, ...
        rotary_dim, head_dim = self.spec.rope.rotary_dim, self.spec.head_dim
        in_head = np.concatenate(
            [np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, head_dim)]
        )
        starts = np.arange(num_heads) * head_dim
        order: NDArray[np.int64] = (starts[:, None] + in_head).reshape(-1)
        return order


def _float32(rows: NDArray[Any], tensor: ReaderTensor) -> Float32Array:
    """Dequantise `rows` of the tensor's data into an array of their own. Raises ExportError."""
    try:
        return np.array(dequantize(rows, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise ExportError(f"tensor {tensor.name}: type {tensor.tensor_type.name} cannot be read") from error


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """[out_features, in_features]: the file lists dimensions from the fastest."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _metadata(reader: GGUFReader) -> dict[str, object]:
    fields = reader.fields.items()
    return {
        key: field.contents()
        for key, field in fields
        if field.types[0] != GGUFValueType.ARRAY or len(field.data) <= _MAX_LIST or key in VOCABULARY_KEYS
    }
