"""Tensor sources: GGUF and Hugging Face forms of one model agree, block grids are exact, bad files are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from graphs.errors import ExportError
from graphs.gguf_blocks import decode_blocks
from graphs.weights import open_source, tensor_shapes
from tests.unit.tiny_models import hf_tensors, permute, tiny_config, write_gguf, write_hf

Kind = GGMLQuantizationType
CONFIG = tiny_config()


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", CONFIG, hf_tensors(CONFIG))


@pytest.fixture
def hf_path(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "tiny", CONFIG, hf_tensors(CONFIG))


def refusal(path: Path) -> str:
    with pytest.raises(ExportError) as error:
        open_source(path)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_gguf_and_hugging_face_forms_of_a_model_are_equal(gguf_path: Path, hf_path: Path) -> None:
    from_gguf, from_hf = open_source(gguf_path), open_source(hf_path)

    names = tensor_shapes(from_hf.spec)
    assert len(names) == 3 + 2 * 13
    for name, shape in names.items():
        values = from_hf.float32(name)
        assert (values.dtype, values.shape) == (np.float32, shape)
        np.testing.assert_array_equal(from_gguf.float32(name), values, err_msg=name)


def test_canonical_names_stand_for_the_tensors_they_should(hf_path: Path) -> None:
    source, stored = open_source(hf_path), hf_tensors(CONFIG)
    for name, stored_name in {
        "embed": "model.embed_tokens.weight",
        "layers.1.q.bias": "model.layers.1.self_attn.q_proj.bias",
        "layers.0.norm2": "model.layers.0.post_attention_layernorm.weight",
        "layers.1.up": "model.layers.1.mlp.up_proj.weight",
        "head": "lm_head.weight",
    }.items():
        np.testing.assert_array_equal(source.float32(name), stored[stored_name])


@pytest.mark.parametrize("write", [write_gguf, write_hf])
def test_a_tied_head_is_the_embedding(tmp_path: Path, write: Callable[..., Path]) -> None:
    config = tiny_config(tie_word_embeddings=True)
    source = open_source(write(tmp_path / "tied", config, hf_tensors(config)))

    assert source.spec.tie_word_embeddings
    assert "head" not in tensor_shapes(source.spec)
    np.testing.assert_array_equal(source.float32("head"), source.float32("embed"))


def test_values_are_the_callers_own(gguf_path: Path, hf_path: Path) -> None:
    for path in (gguf_path, hf_path):
        source = open_source(path)
        source.float32("final_norm")[:] = 0
        assert source.float32("final_norm").any()


def test_only_the_rotated_part_of_each_head_is_reordered(tmp_path: Path) -> None:
    config = tiny_config(num_attention_heads=1, num_key_value_heads=1)
    path = write_gguf(tmp_path / "partial.gguf", config, hf_tensors(config))
    # dimension_count is rewritten in place: rows 0 to 7 of a head are four pairs, the others don't rotate.
    key = b"llama.rope.dimension_count"
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (8).to_bytes(4, "little")
    path.write_bytes(data)
    rows = permute(hf_tensors(config)["model.layers.0.self_attn.k_proj.weight"], 1)

    expected = rows[[0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15]]
    np.testing.assert_array_equal(open_source(path).float32("layers.0.k"), expected)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K])
def test_block_grids_equal_gguf_dequantisation_bit_for_bit(kind: Kind) -> None:
    rng = np.random.default_rng(int(kind))
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (7 * 3, block_bytes), dtype=np.uint8)
    num_scales = 1 if kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0) else 2
    blocks[:, : 2 * num_scales] = rng.normal(0, 1, (21, num_scales)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(7, 3 * block_bytes)

    decoded = decode_blocks(rows, kind)

    assert decoded is not None
    assert decoded.bits == (4 if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K) else 8)
    assert decoded.codes.max() < 2**decoded.bits
    assert decoded.codes.shape == (7, 3 * block_size)
    assert decoded.scales.shape == decoded.offsets.shape == (7, 3 * block_size // 32)
    assert {decoded.codes.dtype, decoded.scales.dtype, decoded.offsets.dtype} == {np.dtype("u1"), np.dtype("f4")}
    np.testing.assert_array_equal(decoded.dequantize(), dequantize(rows, kind))


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q6_K, Kind.IQ4_NL, Kind.BF16, Kind.F16])
def test_types_without_a_grid_of_32_yield_no_blocks(kind: Kind) -> None:
    assert decode_blocks(np.zeros((2, GGML_QUANT_SIZES[kind][1]), np.uint8), kind) is None


def test_blocks_of_q_and_k_are_in_half_split_order(tmp_path: Path) -> None:
    stored = hf_tensors(CONFIG)
    path = write_gguf(tmp_path / "q.gguf", CONFIG, stored, lambda name: Kind.Q8_0 if "attn_k" in name else Kind.Q4_1)
    source = open_source(path)

    for name, file_name, kind in [("q", "q_proj", Kind.Q4_1), ("k", "k_proj", Kind.Q8_0), ("v", "v_proj", Kind.Q4_1)]:
        blocks = source.blocks(f"layers.1.{name}")
        weights = stored[f"model.layers.1.self_attn.{file_name}.weight"]
        assert blocks is not None
        assert blocks.bits == (8 if kind == Kind.Q8_0 else 4)
        np.testing.assert_array_equal(blocks.dequantize(), dequantize(quantize(weights, kind), kind))
        np.testing.assert_array_equal(source.float32(f"layers.1.{name}"), blocks.dequantize())


def test_float_tensors_have_no_blocks(gguf_path: Path, hf_path: Path) -> None:
    assert open_source(gguf_path).blocks("layers.0.q") is None
    assert open_source(gguf_path).blocks("final_norm") is None
    assert open_source(hf_path).blocks("layers.0.q") is None


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_gguf_half_precision_tensors_are_widened(tmp_path: Path, kind: Kind) -> None:
    stored = hf_tensors(CONFIG)["model.layers.0.mlp.down_proj.weight"]
    path = write_gguf(tmp_path / "half.gguf", CONFIG, hf_tensors(CONFIG), lambda name: kind)
    np.testing.assert_array_equal(open_source(path).float32("layers.0.down"), dequantize(quantize(stored, kind), kind))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_hugging_face_shards_of_every_float_type_are_read(tmp_path: Path, dtype: type) -> None:
    stored = hf_tensors(CONFIG)
    path = write_hf(tmp_path / "sharded", CONFIG, stored, dtype=dtype, num_shards=3)
    weights = stored["model.layers.1.mlp.gate_proj.weight"]
    expected = weights.astype(dtype).astype(np.float32)

    assert not (path / "model.safetensors").exists()
    source = open_source(path)
    np.testing.assert_array_equal(source.float32("layers.1.gate"), expected)
    assert np.dtype(dtype).name == source.dtype


def test_only_files_with_matrices_of_one_float_type_tell_the_models(tmp_path: Path, gguf_path: Path) -> None:
    """Norms may be of another; a GGUF file is mostly of a model in bfloat16, and holds no trace of it."""
    tensors = {name: values.astype(np.float16) for name, values in hf_tensors(CONFIG).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    assert "float16" == open_source(write_hf(tmp_path / "one", CONFIG, tensors, dtype=None)).dtype
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    assert open_source(write_hf(tmp_path / "two", CONFIG, tensors, dtype=None)).dtype is None
    assert open_source(gguf_path).dtype is None


def test_generation_settings_complete_the_spec(hf_path: Path) -> None:
    (hf_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))

    spec = open_source(hf_path).spec

    assert (spec.name, spec.eos_token_ids) == ("tiny", (2, 9))


def test_end_tokens_of_a_long_vocabulary_are_found(tmp_path: Path) -> None:
    tokens, types = [f"t{i}" for i in range(5000)], [1] * 5000
    tokens[7], types[7] = "<|im_end|>", 3
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    path = write_gguf(tmp_path / "long.gguf", CONFIG, hf_tensors(CONFIG), vocabulary=vocabulary)
    assert open_source(path).spec.eos_token_ids == (2, 7)


def test_a_gguf_cut_short_anywhere_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    whole, cut = gguf_path.read_bytes(), tmp_path / "cut.gguf"
    for size in [4, 5, 24, 25, 100, 700, 1500, len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:size])
        assert refusal(cut).startswith(f"{cut}: truncated or damaged GGUF file ({size} bytes)"), size


def test_a_gguf_whose_strings_are_no_utf8_is_refused(gguf_path: Path) -> None:
    gguf_path.write_bytes(
        gguf_path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0\xff\xfe\xfd\xfc\xfb")
    )
    assert "can't decode byte 0xff" in refusal(gguf_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"GGU"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: not a GGUF file: it starts with {content[:4]!r}")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", CONFIG, hf_tensors(CONFIG), architecture="starcoder")
    assert refusal(path) == f"{path}: general.architecture: 'starcoder' is not known: one of 'llama'"


def test_a_missing_tensor_is_refused_in_both_forms(tmp_path: Path) -> None:
    tensors = hf_tensors(CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    gguf_path = write_gguf(tmp_path / "x.gguf", CONFIG, tensors)
    hf_path = write_hf(tmp_path / "x", CONFIG, tensors)

    assert refusal(gguf_path) == f"{gguf_path}: tensor blk.1.ffn_up.weight is missing"
    assert refusal(hf_path) == f"{hf_path}: tensor model.layers.1.mlp.up_proj.weight is missing"


def test_a_tensor_of_the_wrong_shape_is_refused_in_both_forms(tmp_path: Path) -> None:
    tensors = hf_tensors(CONFIG)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((64, 95), np.float32)
    gguf_path = write_gguf(tmp_path / "x.gguf", CONFIG, tensors)
    hf_path = write_hf(tmp_path / "x", CONFIG, tensors)

    assert refusal(gguf_path) == f"{gguf_path}: tensor blk.0.ffn_down.weight: shape [64, 95] is not allowed: [64, 96]"
    name = "model.layers.0.mlp.down_proj.weight"
    assert refusal(hf_path) == f"{hf_path}: tensor {name}: shape [64, 95] is not allowed: [64, 96]"


@pytest.mark.parametrize(
    "extra",
    [
        {"blk.0.ffn_up.bias": (96,)},
        {"blk.1.ffn_down.bias": (64,)},
        {"blk.1.attn_q_norm.weight": (16,)},
        {"rope_factors_long.weight": (8,)},
        {"blk.2.attn_norm.weight": (64,)},
    ],
)
def test_a_tensor_that_no_graph_computes_with_is_refused(tmp_path: Path, extra: dict[str, tuple[int, ...]]) -> None:
    tensors = {name: np.ones(shape, np.float32) for name, shape in extra.items()}
    path = write_gguf(tmp_path / "x.gguf", CONFIG, hf_tensors(CONFIG), extra=tensors)
    assert refusal(path).startswith(f"{path}: tensor {next(iter(extra))} is not known: without it")


def test_unknown_tensors_of_a_folder_are_refused_and_counted(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=False)
    path = write_hf(tmp_path / "x", config, hf_tensors(CONFIG))
    assert refusal(path).startswith(f"{path}: tensor model.layers.0.self_attn.k_proj.bias (and 7 more) is not known")


def test_a_bias_in_one_layer_or_part_alone_is_refused(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=False)
    for name in ("blk.1.attn_q.bias", "blk.0.attn_v.bias"):
        width = 64 if "_q" in name else 32
        extra = {name: np.ones(width, np.float32)}
        path = write_gguf(tmp_path / "x.gguf", config, hf_tensors(config), extra=extra)
        assert refusal(path) == f"{path}: tensor blk.0.attn_q.bias is missing"


def test_tables_that_follow_from_the_rope_settings_are_not_needed(tmp_path: Path) -> None:
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    source = open_source(write_hf(tmp_path / "x", CONFIG, hf_tensors(CONFIG) | angles))
    assert source.spec == replace(open_source(write_hf(tmp_path / "y", CONFIG, hf_tensors(CONFIG))).spec, name="x")


def test_a_tied_head_may_have_a_copy_in_the_file_but_no_values_of_its_own(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = hf_tensors(config)
    copy = tensors["model.embed_tokens.weight"].copy()
    assert open_source(write_hf(tmp_path / "x", config, tensors | {"lm_head.weight": copy})).spec.tie_word_embeddings
    copy[3, 4] += 1
    path = write_hf(tmp_path / "x", config, tensors | {"lm_head.weight": copy})
    assert refusal(path).endswith("tie_word_embeddings: True is not allowed: lm_head.weight differs from the embedding")


def test_rope_divisors_of_a_type_that_is_no_float_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(8, np.int32)}
    path = write_gguf(tmp_path / "x.gguf", CONFIG, hf_tensors(CONFIG), extra=extra)
    assert refusal(path) == f"{path}: tensor rope_freqs.weight: type I32 cannot be read"


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_are_not_finite_are_refused_when_read(tmp_path: Path, value: float) -> None:
    tensors = hf_tensors(CONFIG)
    tensors["model.norm.weight"][3] = value
    for path in (write_gguf(tmp_path / "x.gguf", CONFIG, tensors), write_hf(tmp_path / "x", CONFIG, tensors)):
        with pytest.raises(ExportError, match=r"norm\.weight: a value is infinite or not a number"):
            open_source(path).float32("final_norm")


def test_an_integer_tensor_is_refused_when_read(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "x", CONFIG, hf_tensors(CONFIG), dtype=np.int32)
    with pytest.raises(ExportError, match=r"type I32 is not known: one of F64, F32, F16, BF16"):
        open_source(path).float32("embed")


def test_a_folder_without_its_files_is_refused(hf_path: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(empty) == f"{empty / 'config.json'} is missing"
    (hf_path / "model.safetensors").unlink()
    assert refusal(hf_path) == f"{hf_path}: neither model.safetensors nor model.safetensors.index.json is there"


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_config_is_refused(hf_path: Path, text: str) -> None:
    config = hf_path / "config.json"
    config.write_text(text)
    assert refusal(hf_path).startswith(f"{config}: not JSON")
    config.write_text("[]")
    assert refusal(hf_path) == f"{config}: not a JSON object"
    config.write_text(json.dumps(tiny_config(num_hidden_layers=None)))
    assert refusal(hf_path) == f"{config}: num_hidden_layers is missing"


def test_a_safetensors_file_cut_short_is_refused(hf_path: Path) -> None:
    weights = hf_path / "model.safetensors"
    whole = weights.read_bytes()
    for size in [0, 7, 8, 200, len(whole) - 1]:
        weights.write_bytes(whole[:size])
        assert refusal(hf_path).startswith(f"{weights}: not a complete safetensors file"), size


def test_a_missing_shard_and_a_shard_elsewhere_are_refused(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "x", CONFIG, hf_tensors(CONFIG), num_shards=2)
    second, index = path / "model-00002-of-00002.safetensors", path / "model.safetensors.index.json"
    second.unlink()
    assert refusal(path) == f"{second} is missing"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
    assert "weight_map: '../secret.safetensors' is not allowed: a file of the same folder" in refusal(path)
    index.write_text(json.dumps({"weight_map": ["model.norm.weight"]}))
    assert refusal(path) == f"{index}: weight_map is not a mapping of tensors to files"


def test_a_hub_id_is_downloaded_and_named_after_its_id(hf_path: Path, tmp_path: Path) -> None:
    cached = tmp_path / "snapshots" / "0123abcd"
    shutil.copytree(hf_path, cached)
    asked = []

    def download(hub_id: str) -> Path:
        asked.append(hub_id)
        return cached

    assert open_source("someone/tiny-llama", download=download).spec.name == "tiny-llama"
    assert asked == ["someone/tiny-llama"]


@pytest.mark.parametrize("source", ["no_such_file.gguf", "someone/model.gguf", "graphs/no_such_model", "a b/c", "/x/y"])
def test_a_path_that_is_not_there_is_no_hub_id(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])

    def download(hub_id: str) -> Path:
        raise AssertionError(f"{hub_id} was taken for a hub id")

    with pytest.raises(ExportError) as error:
        open_source(source, download=download)
    assert str(error.value) == f"{source}: no such file or folder"
