"""Int8 weights are read from their file into huge pages; everything else stays mapped."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.errors import ModelFolderError
from service.executor.resident_weights import read_resident_weights

SHAPES = {"small": (3, 5), "empty": (0, 4), "large": (2, 8, 16, 4)}


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, np.ndarray]:
    """Arrays that lie one after the other in w.bin, from byte 7 on."""
    generator = np.random.default_rng(5)
    arrays = {name: generator.integers(-128, 128, shape).astype(np.int8) for name, shape in SHAPES.items()}
    (tmp_path / "w.bin").write_bytes(bytes(7) + b"".join(array.tobytes() for array in arrays.values()))
    return arrays


def graph_of(stored: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Initializers for all of `stored`, one that is float and one that lies in the graph itself."""
    tensors = []
    offset = 7
    for name, array in stored.items():
        tensors.append(external(name, TensorProto.INT8, array.shape, offset))
        offset += array.nbytes
    tensors.append(external("float", TensorProto.FLOAT, (2,), 7))
    tensors.append(numpy_helper.from_array(np.ones(3, np.int8), "inline"))
    return helper.make_model(helper.make_graph([], "g", [], [], tensors))


def external(
    name: str, data_type: int, shape: tuple[int, ...], offset: int, location: str = "w.bin"
) -> onnx.TensorProto:
    tensor = TensorProto(name=name, dims=shape, data_type=data_type, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_int8_tensors_of_the_file_are_read_and_no_others(tmp_path: Path, stored: dict[str, np.ndarray]) -> None:
    weights = read_resident_weights(graph_of(stored), tmp_path)
    assert list(stored) == list(weights)
    for name, expected in stored.items():
        assert expected.shape == weights[name].shape
        assert expected.tolist() == weights[name].tolist()
        assert weights[name].ctypes.data % 64 == 0


def test_a_file_that_is_too_short_or_missing_is_named(tmp_path: Path, stored: dict[str, np.ndarray]) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFolderError, match=r"w\.bin: ends before the weights that the graph wants at 22"):
        read_resident_weights(graph_of(stored), tmp_path)
    path.unlink()
    with pytest.raises(ModelFolderError, match=r"w\.bin: cannot be read: "):
        read_resident_weights(graph_of(stored), tmp_path)


def test_a_file_outside_the_folder_is_refused(tmp_path: Path, stored: dict[str, np.ndarray]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensor = external("w", TensorProto.INT8, SHAPES["small"], 7, location="../w.bin")
    graph = helper.make_model(helper.make_graph([], "g", [], [], [tensor]))
    with pytest.raises(ModelFolderError, match=r"'\.\./w\.bin', which is no file of "):
        read_resident_weights(graph, folder)
