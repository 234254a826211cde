"""Adapts an exported graph to this machine and this KV buffer while it is loaded; the model folder stays untouched.

The exporter writes float32 KV inputs and int8 weights. Here the KV inputs get the buffer's element type, and on
processors whose u8 x s8 products saturate (x86 without VNNI) the weights of MatMulInteger become uint8, shifted by 128
together with their zero point, which ONNX Runtime multiplies exactly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from graphs.manifest import WEIGHTS_NAME, ModelInfo
from service.errors import ModelFolderError
from service.executor.kv_layout import SCALE_BYTES, KvDtype

KV_INPUT_PREFIX: Final = "kv_cache."
_ELEMENT_TYPES: Final = {
    KvDtype.FLOAT32: TensorProto.FLOAT,
    KvDtype.FLOAT16: TensorProto.FLOAT16,
    KvDtype.INT8: TensorProto.INT8,
}
_SHIFTED_NAME: Final = "shifted.bin"
_SIGN_BIT: Final = 0x80
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A model as bytes, and the folder that its external data is relative to."""

    model_bytes: bytes
    data_folder: Path


@contextmanager
def open_variant(path: Path, info: ModelInfo, dtype: KvDtype, *, has_int8_dot: bool) -> Iterator[ModelVariant]:
    """The variant of the graph at `path` with a KV buffer of `dtype`.

    Build the session inside the `with`: shifted weights live in a temporary file that goes when it ends, and ONNX
    Runtime has them repacked or mapped by then. Raises ModelFolderError when the graph cannot be read.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf and onnx raise several unrelated types
        raise ModelFolderError(f"{path}: not a readable ONNX file: {error}") from error
    _set_kv_type(model, info, dtype, path)
    targets = [] if has_int8_dot else _saturating_weights(model)
    if not targets:
        yield ModelVariant(model.SerializeToString(), path.parent)
        return
    with TemporaryDirectory(prefix="chairlift-") as folder:
        shifted = Path(folder).resolve() / _SHIFTED_NAME
        _shift_weights(targets, path.parent / WEIGHTS_NAME, shifted)
        _shift_zero_points(model)
        # ONNX Runtime reads external data below one folder only, so all locations become relative to the root.
        _relocate(model, path.parent.resolve() / WEIGHTS_NAME)
        yield ModelVariant(model.SerializeToString(), Path(shifted.anchor))


def _set_kv_type(model: Any, info: ModelInfo, dtype: KvDtype, path: Path) -> None:
    inputs = [value for value in model.graph.input if value.name.startswith(KV_INPUT_PREFIX)]
    if len(inputs) != info.num_layers:
        raise ModelFolderError(f"{path}: has {len(inputs)} KV inputs, the manifest says {info.num_layers} layers")
    for value in inputs:
        tensor = value.type.tensor_type
        tensor.elem_type = _ELEMENT_TYPES[dtype]
        width = tensor.shape.dim[-1]
        if dtype is KvDtype.INT8 and width.HasField("dim_value"):
            width.dim_value = info.head_dim + SCALE_BYTES


def _matmuls(model: Any) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == "MatMulInteger"]


def _saturating_weights(model: Any) -> list[Any]:
    """The int8 initializers that MatMulInteger multiplies by."""
    names = {node.input[1] for node in _matmuls(model)}
    return [
        tensor for tensor in model.graph.initializer if tensor.name in names and tensor.data_type == TensorProto.INT8
    ]


def _shift_weights(tensors: list[Any], source: Path, target: Path) -> None:
    """Write the uint8 twins of external int8 `tensors` to `target` and point the tensors there."""
    weights = np.memmap(source, np.uint8, "r")
    with target.open("wb") as file:
        for tensor in tensors:
            fields = {entry.key: entry.value for entry in tensor.external_data}
            start, length = int(fields.get("offset", 0)), int(fields["length"])
            offset = file.tell()
            for begin in range(start, start + length, _CHUNK_BYTES):
                (weights[begin : min(begin + _CHUNK_BYTES, start + length)] ^ _SIGN_BIT).tofile(file)
            tensor.data_type = TensorProto.UINT8
            _set_location(tensor, location=str(target.relative_to(target.anchor)), offset=offset, length=length)


def _shift_zero_points(model: Any) -> None:
    name = "shifted_zero_point"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(_SIGN_BIT, np.uint8), name))
    for node in _matmuls(model):
        inputs = list(node.input)
        if len(inputs) > 3:
            inputs[3] = name
        else:
            inputs += [""] * (3 - len(inputs)) + [name]
        del node.input[:]
        node.input.extend(inputs)


def _relocate(model: Any, weights: Path) -> None:
    location = str(weights.relative_to(weights.anchor))
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value == WEIGHTS_NAME:
                entry.value = location


def _set_location(tensor: Any, **fields: object) -> None:
    del tensor.external_data[:]
    tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=str(value)) for key, value in fields.items())
