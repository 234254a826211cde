"""A graph adapted to KV type and processor computes the same numbers, and its folder stays as it was."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphs.manifest import PREFILL_NAME, WEIGHTS_NAME, ModelInfo
from service.errors import ModelFolderError
from service.executor.kv_layout import KvDtype
from service.executor.model_variant import ModelVariant, open_variant

INFO = ModelInfo("m", "llama", 10, 8, 2, 2, 1, 4, 64, None, (1,), False)
RNG = np.random.default_rng(7)
FIRST, SECOND = (RNG.integers(-127, 128, shape).astype(np.int8) for shape in ((8, 6), (8, 5)))
COLUMN_SCALE = RNG.random(6, dtype=np.float32)


def external(name: str, array: np.ndarray, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
    tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    for key, value in {"location": WEIGHTS_NAME, "offset": offset, "length": array.nbytes}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


@pytest.fixture
def graph_path(tmp_path: Path) -> Path:
    """Two MatMulInteger, with and without a zero point, a float weight, and two KV inputs."""
    kv = [
        helper.make_tensor_value_info(f"kv_cache.{i}", TensorProto.FLOAT, ["blocks", 2, 1, "size", "width"])
        for i in range(2)
    ]
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, ["tokens", 8])
    nodes = [
        helper.make_node("MatMulInteger", ["x", "first", "", "zero"], ["a"]),
        helper.make_node("MatMulInteger", ["x", "second"], ["b"]),
        helper.make_node("Cast", ["a"], ["float_a"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float_a", "scale"], ["scaled"]),
    ]
    outputs = [
        helper.make_tensor_value_info("scaled", TensorProto.FLOAT, ["tokens", 6]),
        helper.make_tensor_value_info("b", TensorProto.INT32, ["tokens", 5]),
    ]
    weights = [
        external("scale", COLUMN_SCALE, 0),
        external("first", FIRST, 64),
        external("second", SECOND, 128),
        numpy_helper.from_array(np.zeros((), np.int8), "zero"),
    ]
    graph = helper.make_graph(nodes, "g", [x, *kv], outputs, weights)
    opset = [helper.make_opsetid("", 21)]
    (tmp_path / PREFILL_NAME).write_bytes(
        helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    )
    data = bytearray(168)
    for start, array in ((0, COLUMN_SCALE), (64, FIRST), (128, SECOND)):
        data[start : start + array.nbytes] = array.tobytes()
    (tmp_path / WEIGHTS_NAME).write_bytes(data)
    return tmp_path / PREFILL_NAME


def load(variant: ModelVariant) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(variant.data_folder))
    return ort.InferenceSession(variant.model_bytes, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("has_int8_dot", [True, False])
@pytest.mark.parametrize("dtype", KvDtype)
def test_every_variant_multiplies_exactly(graph_path: Path, dtype: KvDtype, has_int8_dot: bool) -> None:
    with open_variant(graph_path, INFO, dtype, has_int8_dot=has_int8_dot) as variant:
        session = load(variant)
    x = np.random.default_rng(3).integers(0, 256, (3, 8)).astype(np.uint8)
    kv = np.zeros((2, 2, 1, 16, 8), dtype)
    scaled, second = session.run(None, {"x": x, "kv_cache.0": kv, "kv_cache.1": kv})
    assert ((x.astype(np.int32) @ FIRST).astype(np.float32) * COLUMN_SCALE).tolist() == scaled.tolist()
    assert (x.astype(np.int32) @ SECOND).tolist() == second.tolist()


def test_weights_become_uint8_only_where_int8_saturates(graph_path: Path) -> None:
    kinds = {}
    for has_int8_dot in (True, False):
        with open_variant(graph_path, INFO, KvDtype.FLOAT32, has_int8_dot=has_int8_dot) as variant:
            model = onnx.load_from_string(variant.model_bytes)
        kinds[has_int8_dot] = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    int8, uint8 = TensorProto.INT8, TensorProto.UINT8
    assert (int8, int8) == (kinds[True]["first"], kinds[True]["second"])
    assert (uint8, uint8, TensorProto.FLOAT) == tuple(kinds[False][name] for name in ("first", "second", "scale"))


def test_nothing_is_left_behind_and_the_folder_is_unchanged(graph_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in graph_path.parent.iterdir()}
    with open_variant(graph_path, INFO, KvDtype.INT8, has_int8_dot=False) as variant:
        model = onnx.load_from_string(variant.model_bytes)
        files = {
            variant.data_folder / entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert all(path.is_file() for path in files)
    assert {graph_path.parent / WEIGHTS_NAME} == {path for path in files if path.exists()}
    assert before == {path.name: path.read_bytes() for path in graph_path.parent.iterdir()}


def test_a_damaged_graph_and_a_foreign_one_are_named(graph_path: Path) -> None:
    wrong = ModelInfo("m", "llama", 10, 8, 3, 2, 1, 4, 64, None, (1,), False)
    with (
        pytest.raises(ModelFolderError, match=r"prefill\.onnx: has 2 KV inputs, the manifest says 3 layers"),
        open_variant(graph_path, wrong, KvDtype.FLOAT32, has_int8_dot=True),
    ):
        pass
    graph_path.write_bytes(b"\xff" * 100)
    with (
        pytest.raises(ModelFolderError, match=r"prefill\.onnx: not a readable ONNX file"),
        open_variant(graph_path, INFO, KvDtype.FLOAT32, has_int8_dot=True),
    ):
        pass
