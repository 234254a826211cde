"""The graph of one node, `chairlift.SampleRows`, over the logits of a step."""

from typing import Final

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from service.core.types import Float32Array, Int32Array
from service.errors import ExecutorError
from service.executor.bound_session import BoundSession
from service.executor.buffers import aligned_zeros
from service.executor.sampler import RowParams

_OPSET: Final = 21
_IR_VERSION: Final = 10

PARAM_TYPES: Final = {
    "temperature": TensorProto.FLOAT,
    "top_k": TensorProto.INT32,
    "top_p": TensorProto.FLOAT,
    "min_p": TensorProto.FLOAT,
    "seed": TensorProto.INT64,
    "position": TensorProto.INT32,
}
"""The op's inputs after the logits, each `[num_rows]`: RowParams by their ONNX types."""


class SampleRowsSession:
    """Samples prefixes of `logits` `[max_num_seqs, vocab_size]` by `params`. Owned by the engine thread."""

    def __init__(self, options: ort.SessionOptions, logits: Float32Array, params: RowParams) -> None:
        session = ort.InferenceSession(_sample_rows_model(), options, providers=["CPUExecutionProvider"])
        self._session: BoundSession | None = BoundSession(session)
        self._bound_rows = 0
        self._logits = logits
        self._params = params
        self._token_ids: Int32Array = aligned_zeros((len(logits),), np.int32)

    def sample(self, num_rows: int) -> Int32Array:
        """Token ids `[num_rows]`, a copy. Raises ExecutorError."""
        if num_rows == 0:
            return np.empty(0, np.int32)
        if self._session is None:
            raise ExecutorError("the executor is closed")
        if num_rows != self._bound_rows:
            params = self._params.prefix(num_rows)
            self._session.bind_input("logits", self._logits[:num_rows])
            for name in RowParams.__slots__:
                self._session.bind_input(name, getattr(params, name))
            self._session.bind_output("token", self._token_ids[:num_rows])
            self._bound_rows = num_rows
        self._session.run()
        return self._token_ids[:num_rows].copy()

    def close(self) -> None:
        """Free the session. Idempotent."""
        self._session = None


def _sample_rows_model() -> bytes:
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["num_rows", "vocab_size"])
    params = [helper.make_tensor_value_info(name, kind, ["num_rows"]) for name, kind in PARAM_TYPES.items()]
    output = helper.make_tensor_value_info("token", TensorProto.INT32, ["num_rows"])
    node = helper.make_node("SampleRows", ["logits", *PARAM_TYPES], ["token"], domain="chairlift")
    graph = helper.make_graph([node], "sample_rows", [logits, *params], [output])
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("chairlift", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    return bytes(model.SerializeToString())
