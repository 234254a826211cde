"""Narrows what an exported graph computes in float32, for CPUs, to the type that a GPU computes in.

Weights are used as they are stored instead of being widened. Norms, biases, and the scales of integer weights are
narrowed once, when ONNX Runtime folds constants. Attention keeps its rotary tables and norms in float32.
"""

from typing import Any, Final

from onnx import TensorProto, helper

from service.errors import ModelFolderError

ATTENTION: Final = "PagedAttention"
_ZERO_CODE: Final = 128.0  # of 8-bit embeddings
_WIDENINGS: Final = {(narrow, TensorProto.FLOAT) for narrow in (TensorProto.FLOAT16, TensorProto.BFLOAT16)}


def narrow(graph: Any, element_type: int) -> None:
    """Let all nodes but attention compute in `element_type`, FLOAT16 or BFLOAT16; inputs and outputs are the caller's.

    Raises ModelFolderError for a Cast that means something else.
    """
    _drop_widening(graph, element_type)
    _share_embeddings(graph, element_type)
    _keep_activations(graph)
    del graph.value_info[:]  # says float32
    _narrow_constants(graph, element_type)


def _drop_widening(graph: Any, element_type: int) -> None:
    """Let readers of a Cast from `element_type` to float32 read what was cast.

    Rows of an embedding in the other 16-bit type are cast to `element_type` instead. Raises ModelFolderError for what
    else is cast.
    """
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    weights = set(types)
    types |= {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    widening = (element_type, TensorProto.FLOAT)
    narrow_name, kept = {}, []
    for node in graph.node:
        if node.op_type != "Cast":
            kept.append(node)
            continue
        (name,) = node.input
        change = (types.get(name, TensorProto.UNDEFINED), helper.get_node_attr_value(node, "to"))
        if change == widening:
            narrow_name[node.output[0]] = name
        elif change in _WIDENINGS and name not in weights:
            kept.append(helper.make_node("Cast", [name], [node.output[0]], name=node.name, to=element_type))
        else:
            found, allowed = (" to ".join(map(TensorProto.DataType.Name, each)) for each in (change, widening))
            raise ModelFolderError(f"casts {name!r} from {found}: only {allowed} runs on cuda")
    for node in kept:
        node.input[:] = [narrow_name.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(kept)


def _share_embeddings(graph: Any, element_type: int) -> None:
    """Take embeddings from the head's own codes where both are the same bytes: a device would hold them twice.

    The head's table is [vocab_size, blocks, block_size], which the op that gathers quantised rows does not read, so its
    few nodes do that here.
    """
    head_of = {}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.UINT8 and len(tensor.dims) == 3 and tensor.external_data:
            head_of[_place(tensor)] = tensor.name
    table_of = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        table = table_of.get(node.input[0]) if node.op_type == "GatherBlockQuantized" else None
        head = head_of.get(_place(table)) if table is not None else None
        if head is None:
            nodes.append(node)
            continue
        nodes += _gather_blocks(graph, node, head, element_type)
        graph.initializer.remove(table)
    del graph.node[:]
    graph.node.extend(nodes)


def _gather_blocks(graph: Any, node: Any, head: str, element_type: int) -> list[Any]:
    """Nodes that yield what `node` does, a GatherBlockQuantized, from `head` uint8[vocab_size, blocks, block_size]."""
    _, rows, scales = node.input
    (out,) = node.output
    zero, last, flat = (f"{out}/{name}" for name in ("zero", "last", "flat"))
    graph.initializer.append(helper.make_tensor(zero, element_type, [], [_ZERO_CODE]))
    graph.initializer.append(helper.make_tensor(last, TensorProto.INT64, [1], [-1]))
    graph.initializer.append(helper.make_tensor(flat, TensorProto.INT64, [2], [0, -1]))

    def make(op_type: str, inputs: list[str], name: str, **attributes: Any) -> Any:
        return helper.make_node(op_type, inputs, [name], name=name, **attributes)

    return [
        make("Gather", [head, rows], f"{out}/codes", axis=0),
        make("Cast", [f"{out}/codes"], f"{out}/code_values", to=element_type),
        make("Sub", [f"{out}/code_values", zero], f"{out}/steps"),
        make("Gather", [scales, rows], f"{out}/row_scales", axis=0),
        make("Unsqueeze", [f"{out}/row_scales", last], f"{out}/block_scales"),
        make("Mul", [f"{out}/steps", f"{out}/block_scales"], f"{out}/blocks"),
        make("Reshape", [f"{out}/blocks", flat], out),
    ]


def _place(tensor: Any) -> tuple[tuple[str, str], ...]:
    """Where the bytes of external data lie."""
    return tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))


def _keep_activations(graph: Any) -> None:
    """Let no MatMulNBits round its activations to 8 bits, which is for CPUs; CUDA kernels know no such thing."""
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend(kept)


def _narrow_constants(graph: Any, element_type: int) -> None:
    """Cast float32 initializers to `element_type` for all nodes but attention."""
    wide = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    suffix = TensorProto.DataType.Name(element_type).lower()
    casts: dict[str, Any] = {}
    for node in graph.node:
        if node.op_type == ATTENTION:
            continue
        for place, name in enumerate(node.input):
            if name in wide:
                node.input[place] = f"{name}/{suffix}"
                casts[name] = helper.make_node("Cast", [name], [node.input[place]], to=element_type)
    nodes = [*casts.values(), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
