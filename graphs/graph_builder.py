"""Collects the nodes, initializers and shapes of one ONNX graph."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from graphs.weight_file import WeightFile

OPSET: Final = 23  # the first with RMSNormalization
IR_VERSION: Final = 10
MICROSOFT: Final = "com.microsoft"
CHAIRLIFT: Final = "chairlift"

Dim = int | str  # a size, or the name of one that is known at run time only


class Value(NamedTuple):
    """What a node yields."""

    name: str
    data_type: int  # ONNX element type
    shape: tuple[Dim, ...]


def floats(name: str, *shape: Dim) -> Value:
    """A float32 tensor."""
    return Value(name, TensorProto.FLOAT, shape)


def int32s(name: str, *shape: Dim) -> Value:
    """An int32 tensor."""
    return Value(name, TensorProto.INT32, shape)


class GraphBuilder:
    """Grows one graph node by node; names of values are paths such as "layers.0/attention/qkv". One thread."""

    def __init__(self, name: str, weights: WeightFile, location: str) -> None:
        """`weights` holds the large initializers; the graph refers to them in the file `location`."""
        self._name = name
        self._weights = weights
        self._location = location
        self._graph = GraphProto(name=name)
        self._initializers: dict[str, TensorProto] = {}
        self._value_info: list[ValueInfoProto] = []

    def input(self, value: Value) -> str:
        """Declare a graph input; yield its name."""
        self._graph.input.append(helper.make_tensor_value_info(value.name, value.data_type, value.shape))
        return value.name

    def output(self, value: Value) -> None:
        """Declare a node's output as the graph's."""
        self._graph.output.append(helper.make_tensor_value_info(value.name, value.data_type, value.shape))

    def weight(self, name: str) -> str:
        """Make the stored tensor `name` an initializer of this graph; yield its name."""
        if name not in self._initializers:
            self._initializers[name] = self._weights[name].initializer(self._location)
        return name

    def weight_type(self, name: str) -> int:
        """The ONNX element type of the stored tensor `name`."""
        return self._weights[name].data_type

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Make a small constant an initializer kept in the graph file itself; yield its name."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def node(
        self, op_type: str, inputs: Sequence[str], *outputs: Value | None, domain: str = "", **attributes: Any
    ) -> str:
        """Append a node, named after its first output. "" and None stand for inputs and outputs left out.

        Yields the first output's name.
        """
        names = ["" if value is None else value.name for value in outputs]
        for value in outputs:
            if value is not None:
                self._value_info.append(helper.make_tensor_value_info(value.name, value.data_type, value.shape))
        self._graph.node.append(helper.make_node(op_type, inputs, names, name=names[0], domain=domain, **attributes))
        return names[0]

    def rename(self, name: str, new_name: str) -> None:
        """Give the last node's output `name` another name."""
        outputs = self._graph.node[-1].output
        outputs[list(outputs).index(name)] = new_name
        for info in self._value_info:
            if info.name == name:
                info.name = new_name

    def finish(self, description: str) -> ModelProto:
        """The model, without the external data."""
        self._graph.initializer.extend(self._initializers.values())
        outputs = {value.name for value in self._graph.output}
        self._graph.value_info.extend(info for info in self._value_info if info.name not in outputs)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid(CHAIRLIFT, 1)]
        model = helper.make_model(self._graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="chairlift")
        model.doc_string = description
        return model


def int64s(*values: int) -> NDArray[np.int64]:
    """A small int64 vector, the type of ONNX shapes and axes."""
    return np.array(values, dtype=np.int64)
