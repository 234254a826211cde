"""The graph that a GPU runs: float16 between tokens and logits, whatever was exported around it."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from graphs.manifest import DECODE_NAME, PREFILL_NAME, Manifest
from service.errors import ModelFolderError
from service.executor.cuda.graph import cuda_graph
from tests.cuda.simulated_kernels import FLOAT16


@pytest.mark.parametrize("name", [PREFILL_NAME, DECODE_NAME])
def test_only_constants_are_cast_and_only_to_float16(tiny_float16, name: str) -> None:
    """Two layers: four norms and the final one, and biases of qkv and o."""
    model = onnx.load_from_string(
        cuda_graph(tiny_float16 / name, Manifest.load(tiny_float16).model, "chairlift", FLOAT16).content
    )
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    casts = [node for node in graph.node if node.op_type == "Cast"]
    assert {TensorProto.FLOAT16} == {node.attribute[0].i for node in casts}
    assert {TensorProto.FLOAT} == {constants[node.input[0]].data_type for node in casts}
    assert 2 * 2 + 1 + 2 * 2 == len(casts)
    read = [constants[value] for node in graph.node for value in node.input if value in constants]
    of_attention = {value for node in graph.node if node.op_type == "PagedAttention" for value in node.input}
    wide = {tensor.name for tensor in read if tensor.data_type == TensorProto.FLOAT} - {node.input[0] for node in casts}
    assert {"rope.cos", "rope.sin"} == wide == wide & of_attention
    typed = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert {"logits", "kv_cache.0", "kv_cache.1"} == {n for n, kind in typed.items() if kind == TensorProto.FLOAT16}


def test_attention_moves_to_the_domain_of_the_device(tiny_float16) -> None:
    info = Manifest.load(tiny_float16).model
    graph = onnx.load_from_string(
        cuda_graph(tiny_float16 / PREFILL_NAME, info, "chairlift.simulated", FLOAT16).content
    ).graph
    assert {"chairlift.simulated"} == {node.domain for node in graph.node if node.op_type == "PagedAttention"}


@pytest.mark.parametrize(("name", "rows"), [(PREFILL_NAME, "num_logits"), (DECODE_NAME, "num_tokens")])
def test_the_graph_ends_with_a_token_for_every_row_of_logits(tiny_float16, name: str, rows: str) -> None:
    info = Manifest.load(tiny_float16).model
    graph = onnx.load_from_string(cuda_graph(tiny_float16 / name, info, "chairlift.simulated", FLOAT16).content).graph
    last = graph.node[-1]
    assert ("SampleRows", "chairlift.simulated", ["token"]) == (last.op_type, last.domain, list(last.output))
    params = ["temperature", "top_k", "top_p", "min_p", "seed", "position"]
    assert ["logits", *params] == list(last.input)
    assert ["logits", "token"] == [value.name for value in graph.output]
    shapes = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    assert [[rows]] * len(params) == [shapes[name] for name in params]


def with_windows(path: Path, folder: Path, *windows: int) -> Path:
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    for node, window in zip(nodes, windows, strict=True):
        next(attribute for attribute in node.attribute if attribute.name == "sliding_window").i = window
    onnx.save(model, folder / path.name)
    return folder / path.name


@pytest.mark.parametrize(("windows", "expected"), [((0, 0), 0), ((9, 9), 9), ((9, 50), 50), ((9, 0), 0)])
def test_the_planners_window_is_what_every_layer_keeps_within(tiny_float16, tmp_path, windows, expected: int) -> None:
    path = with_windows(tiny_float16 / PREFILL_NAME, tmp_path, *windows)
    assert expected == cuda_graph(path, Manifest.load(tiny_float16).model, "chairlift", FLOAT16).sliding_window


def test_what_is_no_graph_of_this_model_is_refused(tiny_float16, tmp_path) -> None:
    info = Manifest.load(tiny_float16).model
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no graph")
    with pytest.raises(ModelFolderError, match="not a readable ONNX file"):
        cuda_graph(bad, info, "chairlift", FLOAT16)
    model = onnx.load(tiny_float16 / PREFILL_NAME, load_external_data=False)
    del model.graph.input[-1]
    onnx.save(model, bad)
    with pytest.raises(ModelFolderError, match="has 1 KV inputs, the manifest says 2 layers"):
        cuda_graph(bad, info, "chairlift", FLOAT16)


def changed(path: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, folder / path.name)
    return folder / path.name


def first_cast(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == "Cast")


def cast_to_double(graph: onnx.GraphProto) -> None:
    first_cast(graph).attribute[0].i = TensorProto.DOUBLE


def cast_tokens(graph: onnx.GraphProto) -> None:
    first_cast(graph).input[0] = "token_ids"


def cast_what_has_no_type(graph: onnx.GraphProto) -> None:
    first_cast(graph).input[0] = "nowhere"


def drop_attention(graph: onnx.GraphProto) -> None:
    kept = [node for node in graph.node if node.op_type != "PagedAttention"]
    del graph.node[:]
    graph.node.extend(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cast_to_double, "from FLOAT16 to DOUBLE: only FLOAT16 to FLOAT runs on cuda"),
        (cast_tokens, "casts 'token_ids' from INT32 to FLOAT"),
        (cast_what_has_no_type, "casts 'nowhere' from UNDEFINED to FLOAT"),
        (drop_attention, "has 0 PagedAttention nodes, the manifest says 2 layers"),
    ],
)
def test_graphs_that_would_change_their_meaning_are_refused(tiny_float16, tmp_path, change, message: str) -> None:
    path = changed(tiny_float16 / PREFILL_NAME, tmp_path, change)
    with pytest.raises(ModelFolderError, match=f"{PREFILL_NAME}: .*{message}"):
        cuda_graph(path, Manifest.load(tiny_float16).model, "chairlift", FLOAT16)
