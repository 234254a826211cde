"""What ONNX Runtime does with graph ids: how often it computes in the first run of one, replays, runs without."""

from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from service.executor.cuda.session import EAGER
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.ort_session import memory_name, open_session
from tests.cuda.gpu_check.report import Row

# Graph id, which counter is bound, which counter must move, by how much on a GPU; the simulator has no graphs.
# A first run computes twice to warm up, is captured, and is replayed; later ones use what was bound when captured.
RUNS = (
    ("first run of id 1", 1, 0, 0, 3),
    ("first run of id 2", 2, 1, 1, 3),
    ("replay of id 1", 1, 0, 0, 1),
    ("no graph", EAGER, 1, 1, 1),
    ("replay of id 1, the other counter bound", 1, 1, 0, 1),
    ("replay of id 2", 2, 1, 1, 1),
)


def graph_ids(device: CheckDevice) -> Iterator[Row]:
    """Each run adds one to a counter that is bound as input and as output. Only replays are judged."""
    counters = Counters(device)
    wrong = []
    try:
        for name, graph_id, bound, moved, expected in RUNS:
            before = counters.values()
            counters.run(graph_id, bound)
            times = [int(now - then) for now, then in zip(counters.values(), before, strict=True)]
            wanted = [0, 0]
            is_gpu = device.name == "cuda"
            wanted[moved if is_gpu else bound] = expected if is_gpu else 1
            yield {"run": name, "computed": str(times), "expected": str(wanted)}
            if times != wanted and not name.startswith("first"):
                wrong.append(name)
    finally:
        counters.close()
    if wrong:
        raise StepFailedError(f"computed otherwise than expected: {', '.join(wrong)}")


class Counters:
    """Two numbers on the device, and a session that adds one to either."""

    def __init__(self, device: CheckDevice) -> None:
        self._device = device
        self._session = open_session(device, counting_model(), captures=True)
        self._addresses = [device.upload(np.zeros(1, np.float32)) for _ in range(2)]
        self._bindings = [self._bind(address, memory_name(device)) for address in self._addresses]

    def _bind(self, address: int, memory: str) -> ort.IOBinding:
        binding = self._session.io_binding()
        binding.bind_input("before", memory, 0, np.float32, (1,), address)
        binding.bind_output("after", memory, 0, np.float32, (1,), address)
        return binding

    def run(self, graph_id: int, bound: int) -> None:
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self._session.run_with_iobinding(self._bindings[bound], options)

    def values(self) -> list[float]:
        found = []
        for address in self._addresses:
            value = np.empty(1, np.float32)
            self._device.copy_out(address, value)
            found.append(float(value[0]))
        return found

    def close(self) -> None:
        self._bindings.clear()
        del self._session
        for address in self._addresses:
            self._device.free(address)


def counting_model() -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,)) for name in ("before", "after")]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    node = helper.make_node("Add", ["before", "one"], ["after"])
    graph = helper.make_graph([node], "count", values[:1], values[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()
