"""Turns an exported graph into the one that a GPU runs, while it is loaded; the model folder stays untouched.

Exported graphs compute in float32, for CPUs. On a GPU everything between the tokens and the logits is float16:
weights are used as they are stored instead of being widened, norms and biases are narrowed once, when ONNX Runtime
folds constants, and the KV buffer is float16 as well. Attention keeps its rotary tables and norms in float32.

The graph goes on to the tokens there: SampleRows follows the logits, which stay an output, where they are for a host
that wants to see some.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnx import TensorProto, helper

from graphs.manifest import ModelInfo
from service.errors import ModelFolderError
from service.executor.model_variant import read_graph
from service.executor.sample_rows import PARAM_TYPES

_ATTENTION: Final = "PagedAttention"


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A graph to be loaded, and what planning its attention takes."""

    content: bytes
    sliding_window: int  # tokens that a token sees, itself included; 0: all before it


def cuda_graph(path: Path, info: ModelInfo, op_domain: str) -> CudaGraph:
    """The graph at `path` in float16, with the attention of `op_domain`, and the tokens that its SampleRows samples.

    Its external data stays where it is, relative to the folder of `path`. Raises ModelFolderError when the graph cannot
    be read or does not have the layers of `info`.
    """
    model, kv_inputs = read_graph(path, info)
    graph = model.graph
    for value in (*kv_inputs, *graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    try:
        _drop_widening(graph)
    except ModelFolderError as error:
        raise ModelFolderError(f"{path}: {error}") from error
    del graph.value_info[:]  # says float32
    _narrow_constants(graph)
    windows = [_adopt(node, op_domain) for node in graph.node if node.op_type == _ATTENTION]
    if len(windows) != info.num_layers:
        raise ModelFolderError(
            f"{path}: has {len(windows)} {_ATTENTION} nodes, the manifest says {info.num_layers} layers"
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


def _drop_widening(graph: Any) -> None:
    """Let readers of a Cast from float16 to float32 read what was cast. Raises ModelFolderError for another Cast."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    for node in graph.node:
        if node.op_type == "Cast":
            change = (types.get(node.input[0], TensorProto.UNDEFINED), helper.get_node_attr_value(node, "to"))
            if change != (TensorProto.FLOAT16, TensorProto.FLOAT):
                names = " to ".join(map(TensorProto.DataType.Name, change))
                raise ModelFolderError(f"casts {node.input[0]!r} from {names}: only FLOAT16 to FLOAT runs on cuda")
    narrow = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    kept = [node for node in graph.node if node.op_type != "Cast"]
    for node in kept:
        node.input[:] = [narrow.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(kept)


def _narrow_constants(graph: Any) -> None:
    """Cast float32 initializers to float16 for all nodes but attention."""
    wide = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    casts: dict[str, Any] = {}
    for node in graph.node:
        if node.op_type == _ATTENTION:
            continue
        for place, name in enumerate(node.input):
            if name in wide:
                node.input[place] = f"{name}/float16"
                casts[name] = helper.make_node("Cast", [name], [node.input[place]], to=TensorProto.FLOAT16)
    nodes = [*casts.values(), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
