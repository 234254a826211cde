"""Weights that the CPU's kernels read where they lie, in memory on huge pages.

ONNX Runtime maps the file of weights. A step reads all of them, so with the file's 4 KiB pages about a tenth of a
decode step goes into address translation. What ONNX Runtime repacks needs no such care: it copies that to memory of
its own. The price: each process holds weights of its own, where the file's pages were shared.
"""

import math
import os
from contextlib import ExitStack
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo

from service.errors import ModelFolderError
from service.executor.buffers import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, aligned_zeros

Int8Array = npt.NDArray[np.int8]
_READ_IN_PLACE: Final = TensorProto.INT8


def read_resident_weights(model: onnx.ModelProto, folder: Path) -> dict[str, Int8Array]:
    """The int8 initializers of `model` that lie in files of `folder`, by name; views of one array.

    Raises ModelFolderError when a file does not hold what the graph says.
    """
    tensors = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == _READ_IN_PLACE and tensor.data_location == TensorProto.EXTERNAL
    ]
    lengths = [math.prod(tensor.dims) for tensor in tensors]
    strides = [-(-length // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for length in lengths]
    memory = aligned_zeros((sum(strides),), np.int8, HUGE_PAGE_BYTES)
    weights: dict[str, Int8Array] = {}
    first = 0
    with ExitStack() as files:
        open_once = lru_cache(lambda location: files.enter_context(_open(folder, location)))
        for tensor, length, stride in zip(tensors, lengths, strides, strict=True):
            weights[tensor.name] = memory[first : first + length].reshape(tuple(tensor.dims))
            info = ExternalDataInfo(tensor)
            _read(open_once(info.location), info.offset or 0, memory[first : first + length])
            first += stride
    return weights


def _open(folder: Path, location: str) -> BufferedReader:
    path = folder / location
    if path.name != location:
        raise ModelFolderError(f"the graph wants weights from {location!r}, which is no file of {folder}")
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot be read: {error}") from error


def _read(file: BufferedReader, offset: int, out: Int8Array) -> None:
    try:
        file.seek(offset)
        num_read = file.readinto(out.data)
        # Read twice, for its hash and now, the file's cache counts as in use, and no more as free memory.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), offset, len(out), os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise ModelFolderError(f"{file.name}: cannot be read: {error}") from error
    if num_read < len(out):
        raise ModelFolderError(f"{file.name}: ends before the weights that the graph wants at {offset}")
