"""One op of the library alone in a model, run by ONNX Runtime, on a chosen instruction set."""

import ctypes

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from graphs.ops import library_path

LIBRARY = ctypes.CDLL(str(library_path()))
LIBRARY.chairlift_isa.restype = ctypes.c_char_p


def supported_isas() -> list[str]:
    """The instruction sets that this machine can run, the plain one first."""
    names = [isa for isa in ("generic", "avx2", "avx512", "neon") if LIBRARY.chairlift_set_isa(isa.encode()) == 0]
    LIBRARY.chairlift_set_isa(b"auto")
    return names


class OpSession:
    """A session around one node. Inputs are numpy arrays, or None for an optional input left out."""

    def __init__(self, op_type, inputs, num_outputs, output_types, num_threads=1, domain="chairlift", **attributes):
        names = [f"i{i}" if array is not None else "" for i, array in enumerate(inputs)]
        outputs = [f"o{i}" for i in range(num_outputs)]
        node = helper.make_node(op_type, names, outputs, domain=domain, **attributes)
        graph = helper.make_graph(
            [node],
            "one",
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(array.dtype), [f"{name}d{axis}" for axis in range(array.ndim)]
                )
                for name, array in zip(names, inputs, strict=True)
                if array is not None
            ],
            [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(outputs, output_types, strict=True)],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)],
            ir_version=10,
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.register_custom_ops_library(str(library_path()))
        self._session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(self, inputs) -> list[np.ndarray]:
        feeds = {f"i{i}": array for i, array in enumerate(inputs) if array is not None}
        return self._session.run(None, feeds)


OUTPUT_TYPES = {
    "QuantizedLinear": (TensorProto.FLOAT,),
    "RmsNormLinear": (TensorProto.FLOAT,),
    "AddRmsNormLinear": (TensorProto.FLOAT, TensorProto.FLOAT),
    "SwiGluLinear": (TensorProto.FLOAT,),
    "SampleRows": (TensorProto.INT32,),
}


def run_op(op_type, *inputs, num_threads=1, **attributes):
    """The op's outputs: a list, or the array alone where there is one output."""
    types = OUTPUT_TYPES[op_type]
    session = OpSession(op_type, inputs, len(types), types, num_threads, **attributes)
    outputs = session.run(inputs)
    return outputs[0] if len(outputs) == 1 else outputs
