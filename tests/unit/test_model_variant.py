"""A graph adapted to a KV type computes the same numbers, and its folder stays as it was."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from graphs.manifest import PREFILL_NAME, WEIGHTS_NAME, ModelInfo
from service.errors import ModelFolderError
from service.executor.kv_layout import CPU_KV_DTYPES, KvDtype
from service.executor.model_variant import model_variant

INFO = ModelInfo("m", "llama", 6, 8, 2, 2, 1, 4, 64, None, (1,), False)
SCALE = np.random.default_rng(7).random(6, dtype=np.float32)


@pytest.fixture
def graph_path(tmp_path: Path) -> Path:
    """x * scale, the scale in weights.bin, and two KV inputs."""
    kv = [
        helper.make_tensor_value_info(f"kv_cache.{i}", TensorProto.FLOAT, ["blocks", 2, 1, "size", "width"])
        for i in range(2)
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", 6])
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["tokens", 6])
    scale = TensorProto(name="scale", dims=[6], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": WEIGHTS_NAME, "offset": 64, "length": SCALE.nbytes}.items():
        scale.external_data.add(key=key, value=str(value))
    graph = helper.make_graph([helper.make_node("Mul", ["x", "scale"], ["logits"])], "g", [x, *kv], [y], [scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / PREFILL_NAME).write_bytes(model.SerializeToString())
    (tmp_path / WEIGHTS_NAME).write_bytes(bytes(64) + SCALE.tobytes())
    return tmp_path / PREFILL_NAME


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES)
def test_every_variant_computes_the_same_and_takes_its_kv_type(graph_path: Path, dtype: KvDtype) -> None:
    before = {path.name: path.read_bytes() for path in graph_path.parent.iterdir()}
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph_path.parent))
    variant = model_variant(graph_path, INFO, dtype)
    session = ort.InferenceSession(variant.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(3).random((3, 6), dtype=np.float32)
    kv = np.zeros((2, 2, 1, 16, 8), dtype)
    (y,) = session.run(None, {"x": x, "kv_cache.0": kv, "kv_cache.1": kv})
    assert (x * SCALE).tolist() == y.tolist()
    assert before == {path.name: path.read_bytes() for path in graph_path.parent.iterdir()}


def test_a_damaged_graph_and_a_foreign_one_are_named(graph_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"prefill\.onnx: has 2 KV inputs, the manifest says 3 layers"):
        model_variant(graph_path, replace(INFO, num_layers=3), KvDtype.FLOAT32)
    with pytest.raises(ModelFolderError, match=r"prefill\.onnx: has 6 logits, the manifest says a vocab_size of 7"):
        model_variant(graph_path, replace(INFO, vocab_size=7), KvDtype.FLOAT32)
    graph_path.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelFolderError, match=r"prefill\.onnx: not a readable ONNX file"):
        model_variant(graph_path, INFO, KvDtype.FLOAT32)


@pytest.mark.parametrize("shape", [None, ["tokens", "vocabulary"], [], "no such output"])
def test_logits_without_a_fixed_width_are_named(graph_path: Path, shape: list[str] | str | None) -> None:
    model = onnx.load(graph_path, load_external_data=False)
    del model.graph.output[:]
    if not isinstance(shape, str):
        model.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape))
    graph_path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFolderError, match=r"prefill\.onnx: has no output logits of a fixed width"):
        model_variant(graph_path, INFO, KvDtype.FLOAT32)


def test_a_kv_input_without_a_shape_is_named(graph_path: Path) -> None:
    model = onnx.load(graph_path, load_external_data=False)
    model.graph.input[2].CopyFrom(helper.make_tensor_value_info("kv_cache.1", TensorProto.FLOAT, None))
    graph_path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFolderError, match=r"prefill\.onnx: kv_cache\.1 has no shape"):
        model_variant(graph_path, INFO, KvDtype.INT8)
