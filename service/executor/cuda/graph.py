"""Turns an exported graph into the one that a GPU runs, while it is loaded; the model folder stays untouched.

Exported graphs compute in float32, for CPUs. On a GPU everything between the tokens and the logits has 16 bits, and so
has the KV buffer, or 8 (`narrowing`, `Precision`).

The graph goes on to the tokens there: SampleRows follows the logits, which stay an output, where they are for a host
that wants to see some.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from graphs.manifest import ModelInfo
from service.errors import ModelFolderError
from service.executor.cuda.narrowing import ATTENTION, narrow
from service.executor.cuda.precision import Precision
from service.executor.model_variant import KV_ELEMENT_TYPES, read_graph
from service.executor.sample_rows import PARAM_TYPES


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A graph to be loaded, and what planning its attention takes."""

    content: bytes
    sliding_window: int  # tokens that a token sees, itself included; 0: all before it


def cuda_graph(path: Path, info: ModelInfo, op_domain: str, precision: Precision) -> CudaGraph:
    """The graph at `path` in the types of `precision`, with attention and sampling of `op_domain`.

    Its external data stays where it is, relative to the folder of `path`. Raises ModelFolderError when the graph cannot
    be read or does not have the layers and the vocabulary of `info`.
    """
    model, kv_inputs = read_graph(path, info)
    graph = model.graph
    try:
        narrow(graph, precision.element_type)
    except ModelFolderError as error:
        raise ModelFolderError(f"{path}: {error}") from error
    for value in graph.output:
        value.type.tensor_type.elem_type = precision.element_type
    for value in kv_inputs:
        value.type.tensor_type.elem_type = KV_ELEMENT_TYPES[precision.kv_dtype]
    windows = [_adopt(node, op_domain) for node in graph.node if node.op_type == ATTENTION]
    if len(windows) != info.num_layers:
        raise ModelFolderError(
            f"{path}: has {len(windows)} {ATTENTION} nodes, the manifest says {info.num_layers} layers"
        )
    _append_sampling(graph, op_domain)
    if op_domain not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(op_domain, 1))
    # A plan serves all layers: layers with a window read more than they need where others have none.
    return CudaGraph(model.SerializeToString(), max(windows) if all(windows) else 0)


def _adopt(node: Any, op_domain: str) -> int:
    """Move an attention node to `op_domain`; yields its sliding window."""
    node.domain = op_domain
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "sliding_window"), 0)


def _append_sampling(graph: Any, op_domain: str) -> None:
    """Sample every row of logits, by parameters that are inputs: the output `token`."""
    (logits,) = graph.output
    num_rows = logits.type.tensor_type.shape.dim[0].dim_param
    graph.node.append(helper.make_node("SampleRows", [logits.name, *PARAM_TYPES], ["token"], domain=op_domain))
    graph.input.extend(helper.make_tensor_value_info(name, kind, [num_rows]) for name, kind in PARAM_TYPES.items())
    graph.output.append(helper.make_tensor_value_info("token", TensorProto.INT32, [num_rows]))
