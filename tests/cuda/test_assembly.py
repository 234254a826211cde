"""What loading a session on a GPU leaves behind in the process."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.executor.cuda.assembly import libraries_elsewhere, preload_cuda_libraries, quiet_onnxruntime
from service.executor.cuda.provider import why_not_started
from tests.cuda.host_device import HostDevice


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
        monkeypatch.setattr(ort, "preload_dlls", lambda directory, printed=printed: print(printed, end=""))
        assert expected == preload_cuda_libraries()
    assert "" == capsys.readouterr().out


def test_cuda_libraries_are_looked_for_where_other_packages_are(tmp_path) -> None:
    beside, here, below = (tmp_path / name / "nvidia" for name in ("ort", "here", "below"))
    assert libraries_elsewhere(beside, []) is None
    assert libraries_elsewhere(beside, [here, below]) is None
    library = below / "cu13" / "lib" / "libcublasLt.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    (here / "cu13" / "lib").mkdir(parents=True)
    (here / "cu13" / "lib" / "libnvrtc.so.13").touch()
    assert str(library.parent) == libraries_elsewhere(beside, [here, below])
    assert libraries_elsewhere(below, [here, below]) is None, "ONNX Runtime looks there itself"


def test_packages_elsewhere_are_preloaded(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublasLt.so.13").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    asked: list[str | None] = []

    def preload(directory: str | None) -> None:
        asked.append(directory)

    monkeypatch.setattr(ort, "preload_dlls", preload)
    monkeypatch.setattr(ort, "__file__", str(tmp_path / "other" / "onnxruntime" / "__init__.py"))
    preload_cuda_libraries()
    assert [str(folder)] == asked


DRIVER_SAYS = (
    'provider_options_utils.h:187 Parse Failed to parse provider option "device_id": CUDA failure 35: CUDA driver '
    "version is insufficient for CUDA runtime version ; GPU=-1 ; hostname=vm ; expr=cudaGetDeviceCount(&num_devices); "
)


def test_why_a_provider_does_not_start_is_what_the_driver_says(monkeypatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(DRIVER_SAYS)

    device = HostDevice(launch_address=0)
    assert why_not_started(device, "") is None
    monkeypatch.setattr(ort, "InferenceSession", refused)
    assert (
        "device: cpu cannot be used: ONNX Runtime's CPUExecutionProvider does not start: CUDA failure 35: CUDA driver "
        "version is insufficient for CUDA runtime version"
    ) == str(why_not_started(device, "Failed to load libx.so"))
