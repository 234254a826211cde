"""weights.bin: the initializers of both graphs, written once and referenced by offset."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register
_PAGE_BYTES = 4096
_PAGE_ALIGNED_FROM_BYTES = 1 << 20  # large tensors start on a page of the mapped file


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one initializer lies in the file."""

    name: str
    data_type: int  # ONNX element type
    dims: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    def initializer(self, location: str) -> TensorProto:
        """The initializer that refers to the bytes in the file `location`, relative to the graph's folder."""
        proto = TensorProto(name=self.name, data_type=self.data_type, dims=self.dims)
        proto.data_location = TensorProto.EXTERNAL
        entries = {"location": location, "offset": str(self.offset_bytes), "length": str(self.size_bytes)}
        for key, value in entries.items():
            proto.external_data.add(key=key, value=value)
        return proto


class WeightFile:
    """Appends tensors to a new file. One thread; a context manager, and the file is complete when it is left."""

    def __init__(self, path: Path) -> None:
        """Create `path`. Raises FileExistsError when it is there already."""
        self.path = path
        self._file = path.open("xb")
        self._tensors: dict[str, StoredTensor] = {}

    def __enter__(self) -> Self:
        """Yield itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor added as `name`. Raises KeyError."""
        return self._tensors[name]

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Append `array` in C order, aligned; yield `name`. Raises OSError, or ValueError for a name in use."""
        if name in self._tensors:
            raise ValueError(f"{name} is stored already")
        alignment = _PAGE_BYTES if array.nbytes >= _PAGE_ALIGNED_FROM_BYTES else _ALIGNMENT_BYTES
        position = self._file.tell()
        offset = -(-position // alignment) * alignment
        self._file.write(bytes(offset - position))
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # bfloat16 has no buffer format
        data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        self._tensors[name] = StoredTensor(name, data_type, array.shape, offset, array.nbytes)
        return name

    def alias(self, name: str, original: str, dims: tuple[int, ...]) -> str:
        """Name the bytes of `original` once more, seen in another shape; yield `name`."""
        self._tensors[name] = replace(self._tensors[original], name=name, dims=dims)
        return name
