"""The graphs have the inputs that servers bind, hold only what every provider can run, and share one weight file."""

from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from graphs.decoder import build_decoder
from graphs.decoder_weights import store_decoder
from graphs.plain_store import PlainStore
from graphs.weight_file import WeightFile
from tests.unit.tiny_models import random_source, tiny_spec

FORMATS = ["float32", "float16", "int8", "int4"]


def build(folder: Path, weight_format: str, **changes) -> dict[str, onnx.ModelProto]:
    source = random_source(tiny_spec(**changes))
    with WeightFile(folder / "weights.bin") as file:
        weights = store_decoder(source, PlainStore(source, file, weight_format), file, lambda: None)
        models = {kind: build_decoder(kind, source.spec, weights, file) for kind in ("prefill", "decode")}
    for kind, model in models.items():
        onnx.save(model, folder / f"{kind}.onnx")
    return models


def describe(values):
    return {
        value.name: (
            TensorProto.DataType.Name(value.type.tensor_type.elem_type),
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


def places(model):
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer
    }


def test_inputs_and_outputs_are_the_contracted_ones(tmp_path: Path):
    models = build(tmp_path, "float32")
    kv_cache = ("FLOAT", ["num_blocks", 2, 2, "block_size", "kv_width"])
    inputs = {
        "token_ids": ("INT32", ["num_tokens"]),
        "positions": ("INT32", ["num_tokens"]),
        "slot_mapping": ("INT32", ["num_tokens"]),
        "cu_seqlens": ("INT32", ["num_seqs_plus_1"]),
        "context_lens": ("INT32", ["num_seqs"]),
        "block_table": ("INT32", ["num_seqs", "max_blocks"]),
        "workspace": ("FLOAT", ["workspace_size"]),
        "kv_cache.0": kv_cache,
        "kv_cache.1": kv_cache,
    }
    assert describe(models["decode"].graph.input) == inputs
    assert describe(models["prefill"].graph.input) == inputs | {"logit_indices": ("INT32", ["num_logits"])}
    assert describe(models["decode"].graph.output) == {"logits": ("FLOAT", ["num_tokens", 50])}
    assert describe(models["prefill"].graph.output) == {"logits": ("FLOAT", ["num_logits", 50])}


@pytest.mark.parametrize("weight_format", FORMATS)
def test_graphs_pass_the_checker_and_hold_no_op_that_breaks_capture(tmp_path: Path, weight_format):
    models = build(tmp_path, weight_format, has_qkv_bias=True, has_o_bias=True, has_qk_norm=True)
    for kind, model in models.items():
        onnx.checker.check_model(str(tmp_path / f"{kind}.onnx"))
        assert model.ir_version == 10
        ops = {node.op_type for node in model.graph.node}
        assert not ops & {"If", "Loop", "Scan", "Split", "Concat", "NonZero"}
        assert {node.op_type for node in model.graph.node if node.domain == "chairlift"} == {"PagedAttention"}


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_value_is_named_once_and_described(tmp_path: Path, weight_format):
    for model in build(tmp_path, weight_format).values():
        outputs = [name for node in model.graph.node for name in node.output if name]
        assert max(Counter(outputs).values()) == 1
        assert max(Counter(node.name for node in model.graph.node).values()) == 1
        described = {info.name for info in [*model.graph.value_info, *model.graph.output]}
        assert set(outputs) == described


@pytest.mark.parametrize("weight_format", FORMATS)
def test_both_graphs_read_the_same_bytes_of_one_aligned_file(tmp_path: Path, weight_format):
    models = build(tmp_path, weight_format)
    prefill, decode = places(models["prefill"]), places(models["decode"])
    shared = {name: place for name, place in prefill.items() if place}
    assert shared == {name: place for name, place in decode.items() if place}
    assert {place["location"] for place in shared.values()} == {"weights.bin"}
    assert all(int(place["offset"]) % 64 == 0 for place in shared.values())
    size = (tmp_path / "weights.bin").stat().st_size
    assert max(int(place["offset"]) + int(place["length"]) for place in shared.values()) == size
    inline = [tensor for tensor in models["prefill"].graph.initializer if not tensor.external_data]
    assert all(len(tensor.raw_data) <= 64 for tensor in inline)


@pytest.mark.parametrize("weight_format", ["float32", "float16", "int8"])
def test_a_tied_head_is_stored_once(tmp_path: Path, weight_format):
    """Each format has bytes for one table of 4096 x 64 weights, not for two."""
    (tmp_path / "tied").mkdir()
    (tmp_path / "apart").mkdir()
    build(tmp_path / "tied", weight_format, vocab_size=4096)
    build(tmp_path / "apart", weight_format, vocab_size=4096, tie_word_embeddings=False)
    tied, apart = ((tmp_path / name / "weights.bin").stat().st_size for name in ("tied", "apart"))
    table_bytes = 4096 * 64 * {"float32": 4, "float16": 2, "int8": 2}[weight_format]  # int8: beside a float16 embedding
    assert apart - tied == pytest.approx(table_bytes, abs=4096 * 64 // 32 * 4 + 2 * 4096)


def test_a_prefill_step_computes_the_last_mlp_for_rows_with_logits_only(tmp_path: Path):
    model = build(tmp_path, "float32")["prefill"]
    shapes = describe(model.graph.value_info)
    assert shapes["layers.0/mlp/gated"] == ("FLOAT", ["num_tokens", 96])
    assert shapes["layers.1/attended"] == ("FLOAT", ["num_tokens", 64])
    assert shapes["layers.1/mlp/gated"] == ("FLOAT", ["num_logits", 96])


def test_block_sums_are_computed_once_for_all_gemms_of_an_input(tmp_path: Path):
    """With corrections, qkv, o and down need one sum each, gate and up one between them: four a layer."""
    from graphs.tensors import BlockWeights

    source = random_source(tiny_spec())

    class Asymmetric:
        """The same tensors on grids whose zero lies between two codes."""

        spec, path = source.spec, source.path

        def float32(self, name):
            return source.float32(name)

        def blocks(self, name):
            weight = source.float32(name)
            scales = abs(weight).reshape(weight.shape[0], -1, 32).max(axis=2) / 7
            codes = (weight / scales.repeat(32, axis=1)).round() + 7
            return BlockWeights(4, codes.astype("uint8"), scales, -7.3 * scales)

    with WeightFile(tmp_path / "weights.bin") as file:
        weights = store_decoder(source, PlainStore(Asymmetric(), file, "int4"), file, lambda: None)
        model = build_decoder("decode", source.spec, weights, file)
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["ReduceSum"] == 2 * 4 + 1
    assert counts["Gemm"] == 2 * 5 + 1
