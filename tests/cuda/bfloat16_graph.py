"""Runs a bfloat16 graph on ONNX Runtime's CPU provider, which has kernels of float32 for most of its nodes.

Such a node computes in float32 between two Casts, as ONNX Runtime itself does for float16: what is handed on is rounded
to bfloat16 wherever a GPU rounds it.
"""

import onnx
from onnx import TensorProto, helper

AS_THEY_ARE = {"Cast", "Gather", "Reshape", "Unsqueeze"}


def computed_in_float32(content: bytes, op_domain: str) -> bytes:
    """The graph with every node between Casts, except those that only move data and those of `op_domain`."""
    model = onnx.load_from_string(content)
    graph = model.graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        narrow = [name for name in node.input if types.get(name) == TensorProto.BFLOAT16]
        outputs = [name for name in node.output if name]
        if node.op_type == "Cast":
            types[outputs[0]] = helper.get_node_attr_value(node, "to")
        elif node.op_type == "SampleRows":
            types[outputs[0]] = TensorProto.INT32
        elif narrow:
            types |= dict.fromkeys(outputs, TensorProto.BFLOAT16)
        if not narrow or node.op_type in AS_THEY_ARE or node.domain == op_domain:
            nodes.append(node)
            continue
        prefix = f"{node.name or outputs[0]}/in"
        wide_inputs = {name: f"{prefix}/{name}" for name in narrow}
        wide_outputs = {name: f"{name}/wide" for name in outputs}
        node.input[:] = [wide_inputs.get(name, name) for name in node.input]
        node.output[:] = [wide_outputs.get(name, name) for name in node.output]
        nodes += [helper.make_node("Cast", [a], [b], to=TensorProto.FLOAT) for a, b in wide_inputs.items()]
        nodes.append(node)
        nodes += [helper.make_node("Cast", [b], [a], to=TensorProto.BFLOAT16) for a, b in wide_outputs.items()]
    del graph.node[:]
    graph.node.extend(nodes)
    return model.SerializeToString()
