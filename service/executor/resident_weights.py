"""Weights that the CPU's kernels read where they lie, in memory on huge pages.

ONNX Runtime maps the file of weights. A step reads all of them, so with the file's 4 KiB pages about a tenth of a
decode step goes into address translation. What ONNX Runtime repacks needs no such care: it copies that to memory of
its own. The price: each process holds weights of its own, where the file's pages were shared.
"""

import math
import os
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


def read_resident_weights(graph: bytes, folder: Path) -> dict[str, Int8Array]:
    """The int8 initializers of `graph` that lie in files of `folder`, by name; views of one array.

    Raises ModelFolderError when a file does not hold what the graph says.
    """
    tensors = [
        tensor
        for tensor in onnx.load_model_from_string(graph).graph.initializer
        if tensor.data_type == _READ_IN_PLACE and tensor.data_location == TensorProto.EXTERNAL
    ]
    lengths = [math.prod(tensor.dims) for tensor in tensors]
    strides = [-(-length // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for length in lengths]
    memory = aligned_zeros((sum(strides),), np.int8, HUGE_PAGE_BYTES)
    weights: dict[str, Int8Array] = {}
    first = 0
    for tensor, length, stride in zip(tensors, lengths, strides, strict=True):
        weights[tensor.name] = memory[first : first + length].reshape(tuple(tensor.dims))
        _read(ExternalDataInfo(tensor), folder, memory[first : first + length])
        first += stride
    return weights


def _read(info: ExternalDataInfo, folder: Path, out: Int8Array) -> None:
    path = folder / info.location
    if path.name != info.location:
        raise ModelFolderError(f"the graph wants weights from {info.location!r}, which is no file of {folder}")
    try:
        with path.open("rb") as file:
            file.seek(info.offset or 0)
            num_read = file.readinto(out.data)
            # Read twice, for its hash and now, the file's cache counts as in use, and no more as free memory.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), info.offset or 0, len(out), os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot be read: {error}") from error
    if num_read < len(out):
        raise ModelFolderError(f"{path}: ends before the weights that the graph wants at {info.offset or 0}")
