"""Adapts an exported graph to this KV buffer while it is loaded; the model folder stays untouched."""

from pathlib import Path
from typing import Any, Final

import onnx
from onnx import TensorProto

from graphs.manifest import PREFILL_NAME, ModelInfo
from service.errors import ModelFolderError
from service.executor.kv_layout import SCALE_BYTES, KvDtype

KV_INPUT_PREFIX: Final = "kv_cache."
LOGITS: Final = "logits"
KV_ELEMENT_TYPES: Final = {
    KvDtype.FLOAT32: TensorProto.FLOAT,
    KvDtype.FLOAT16: TensorProto.FLOAT16,
    KvDtype.BFLOAT16: TensorProto.BFLOAT16,
    KvDtype.INT8: TensorProto.INT8,
    KvDtype.FP8: TensorProto.FLOAT8E4M3FN,
}


def model_variant(path: Path, info: ModelInfo, dtype: KvDtype) -> onnx.ModelProto:
    """The graph at `path`, which has float32 KV inputs, for a KV buffer of `dtype`.

    Its external data stays where it is, relative to the folder of `path`. Raises ModelFolderError when the graph cannot
    be read or does not have the layers and the vocabulary of `info`.
    """
    model, kv_inputs = read_graph(path, info)
    for value in kv_inputs:
        tensor = value.type.tensor_type
        tensor.elem_type = KV_ELEMENT_TYPES[dtype]
        width = tensor.shape.dim[-1]
        if dtype is KvDtype.INT8 and width.HasField("dim_value"):
            width.dim_value = info.head_dim + SCALE_BYTES
    return model


def count_nodes(model_dir: Path) -> int:
    """The nodes of the folder's graph, of which ONNX Runtime may fuse some."""
    return len(onnx.load(model_dir / PREFILL_NAME, load_external_data=False).graph.node)


def read_graph(path: Path, info: ModelInfo) -> tuple[onnx.ModelProto, list[Any]]:
    """The model at `path` without its external data, and its KV inputs, one per layer of `info`.

    Raises ModelFolderError when the file cannot be read, or does not have those layers and the vocabulary of `info`.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf and onnx raise several unrelated types
        raise ModelFolderError(f"{path}: not a readable ONNX file: {error}") from error
    kv_inputs = [value for value in model.graph.input if value.name.startswith(KV_INPUT_PREFIX)]
    if len(kv_inputs) != info.num_layers:
        raise ModelFolderError(f"{path}: has {len(kv_inputs)} KV inputs, the manifest says {info.num_layers} layers")
    without_shape = [value.name for value in kv_inputs if not value.type.tensor_type.shape.dim]
    if without_shape:
        raise ModelFolderError(f"{path}: {without_shape[0]} has no shape")
    shapes = (value.type.tensor_type.shape for value in model.graph.output if value.name == LOGITS)
    width = next((shape.dim[-1].dim_value for shape in shapes if shape.dim), 0)
    if not width:  # protobuf's value also of a dimension that only has a name
        raise ModelFolderError(f"{path}: has no output {LOGITS} of a fixed width")
    if width != info.vocab_size:
        raise ModelFolderError(f"{path}: has {width} logits, the manifest says a vocab_size of {info.vocab_size}")
    return model, kv_inputs
