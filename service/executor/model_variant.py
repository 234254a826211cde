"""Adapts an exported graph to this KV buffer while it is loaded; the model folder stays untouched."""

from pathlib import Path
from typing import Any, Final

import onnx
from onnx import TensorProto

from graphs.manifest import ModelInfo
from service.errors import ModelFolderError
from service.executor.kv_layout import SCALE_BYTES, KvDtype

KV_INPUT_PREFIX: Final = "kv_cache."
_ELEMENT_TYPES: Final = {
    KvDtype.FLOAT32: TensorProto.FLOAT,
    KvDtype.FLOAT16: TensorProto.FLOAT16,
    KvDtype.INT8: TensorProto.INT8,
}


def model_variant(path: Path, info: ModelInfo, dtype: KvDtype) -> bytes:
    """The graph at `path`, which has float32 KV inputs, for a KV buffer of `dtype`.

    Its external data stays where it is, relative to the folder of `path`. Raises ModelFolderError when the graph cannot
    be read or does not have the layers of `info`.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf and onnx raise several unrelated types
        raise ModelFolderError(f"{path}: not a readable ONNX file: {error}") from error
    _set_kv_type(model, info, dtype, path)
    variant: bytes = model.SerializeToString()
    return variant


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
