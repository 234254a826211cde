"""Where a session's nodes have been put: every one on the device, or the model is refused."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from graphs.manifest import PREFILL_NAME, Manifest
from service.errors import ConfigError, ModelFolderError
from service.executor.cuda.device import Provider
from service.executor.cuda.graph import CudaGraph, cuda_graph
from service.executor.cuda.session import OrtSession, require_placement
from service.executor.op_library import OpLibrary
from tests.cuda.host_device import HostDevice
from tests.cuda.simulated_kernels import FLOAT16


class RefusingDevice(HostDevice):
    """Asks for the CUDA provider in a way that is an error, as nodes are for graphs; without graphs, for the host's.

    There all nodes are elsewhere, as those are that the CUDA provider has no kernel for.
    """

    def providers(self, *, captures: bool) -> Sequence[Provider]:
        return [("CUDAExecutionProvider", None)] if captures else ["CPUExecutionProvider"]


@pytest.fixture
def graph(tiny_float16: Path) -> CudaGraph:
    return cuda_graph(tiny_float16 / PREFILL_NAME, Manifest.load(tiny_float16).model, HostDevice.op_domain, FLOAT16)


def test_a_node_that_is_not_on_the_device_is_named(tiny_float16: Path, graph: CudaGraph) -> None:
    session = OrtSession.load(tiny_float16, graph, OpLibrary().path, HostDevice(0), captures=True)._open()
    require_placement(session, "CPUExecutionProvider")
    message = (
        rf"device: ONNX Runtime {ort.__version__} has no kernel in its CUDAExecutionProvider for \d\d of the model's "
        r"nodes, the first Gather \('.+'\), where logits are tensor\(float16\)"
    )
    with pytest.raises(ConfigError, match=message):
        require_placement(session, "CUDAExecutionProvider")


def test_no_folder_is_blamed_for_nodes_that_keep_a_session_from_capturing(
    tiny_float16: Path, graph: CudaGraph, capsys
) -> None:
    with pytest.raises(ConfigError, match=r"no kernel in its CUDAExecutionProvider for \d\d of the model's nodes"):
        OrtSession.load(tiny_float16, graph, OpLibrary().path, RefusingDevice(0), captures=True)
    assert "" == capsys.readouterr().out, "nor does ONNX Runtime try the CPU on its own"


def test_a_graph_that_cannot_be_loaded_either_way_is_the_folders(tiny_float16: Path) -> None:
    for captures in (False, True):
        with pytest.raises(ModelFolderError, match="ONNX Runtime cannot load it"):
            OrtSession.load(tiny_float16, CudaGraph(b"no", 0), OpLibrary().path, HostDevice(0), captures=captures)


def test_what_is_bound_already_is_not_bound_again(tiny_float16: Path, graph: CudaGraph) -> None:
    binding = OrtSession.load(tiny_float16, graph, OpLibrary().path, HostDevice(0), captures=False).new_binding()
    bound: list[tuple[str, int, tuple[int, ...]]] = []
    record = lambda name, _memory, _device, _dtype, shape, address: bound.append((name, address, shape))  # noqa: E731
    binding.io = SimpleNamespace(bind_input=record, bind_output=record)
    for _ in range(2):
        binding.bind_input("positions", 64, np.int32, (3,))
        binding.bind_output("token", 128, np.int32, (3,))
    binding.bind_input("positions", 64, np.int32, (4,))
    binding.bind_input("positions", 192, np.int32, (4,))
    expected = [("positions", 64, (3,)), ("token", 128, (3,)), ("positions", 64, (4,)), ("positions", 192, (4,))]
    assert expected == bound
