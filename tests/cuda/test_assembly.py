"""What loading a session on a GPU leaves behind in the process."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.executor.cuda.assembly import preload_cuda_libraries, quiet_onnxruntime


def load_a_graph_that_is_warned_about() -> None:
    """It has a constant that no node reads."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    unused = numpy_helper.from_array(np.zeros(1, np.float32), "unused")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y], [unused])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_onnxruntime_is_quiet_while_a_session_is_loaded_and_warns_again_after(capfd) -> None:
    with pytest.raises(KeyError), quiet_onnxruntime():
        load_a_graph_that_is_warned_about()
        raise KeyError
    assert "" == capfd.readouterr().err
    load_a_graph_that_is_warned_about()
    assert "Removing initializer 'unused'" in capfd.readouterr().err


def test_of_what_preloading_prints_the_first_line_is_kept(monkeypatch, capsys) -> None:
    for printed, expected in (("", ""), ("Failed to load libx.so\nFailed to load liby.so\n", "Failed to load libx.so")):
        monkeypatch.setattr(ort, "preload_dlls", lambda printed=printed: print(printed, end=""))
        assert expected == preload_cuda_libraries()
    assert "" == capsys.readouterr().out
