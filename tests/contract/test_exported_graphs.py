"""Exported graphs compute what the reference model computes, whatever the architecture, format and batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from graphs.export import write_graphs
from graphs.graph_runner import Chunk, GraphRunner, PagedSequence
from graphs.reference import ReferenceModel
from graphs.rope import RopeSpec
from graphs.spec import ModelSpec
from graphs.tensors import TensorSource
from graphs.verify import compare, run_graphs
from graphs.weights import open_source
from tests.unit.tiny_export import write_tokenizer_json
from tests.unit.tiny_models import MemorySource, hf_tensors, random_source, tiny_config, tiny_spec, write_gguf

MAX_KL = {"float32": 1e-9, "float16": 1e-5, "bfloat16": 1e-4, "int8": 1e-3, "w8a8": 5e-3, "int4": 0.15}
VARIANTS = {
    "grouped queries": {},
    "one query head per kv head": {"num_kv_heads": 4},
    "biases": {"has_qkv_bias": True, "has_o_bias": True},
    "query and key norms": {"has_qk_norm": True},
    "sliding window and soft cap": {"sliding_window": 9, "softcap": 4.0},
    "part of each head rotated": {"rope": RopeSpec(500.0, 8)},
    "separate head, one layer": {"tie_word_embeddings": False, "num_layers": 1},
    "wide heads": {"head_dim": 64, "hidden_size": 128, "intermediate_size": 160},
}


def spec_with(**changes: object) -> ModelSpec:
    return tiny_spec(vocab_size=256, context_length=128, **changes)


class OwnedSource(MemorySource):
    """Hands out copies, as files do: whoever reads a tensor may change it."""

    def float32(self, name: str) -> np.ndarray:
        return super().float32(name).copy()


def small_source(spec: ModelSpec) -> OwnedSource:
    """Weights small enough that logits, and so KL divergences, are of a real model's size."""
    tensors = random_source(spec).tensors
    return OwnedSource(
        spec, {name: tensor if "norm" in name else tensor * np.float32(0.4) for name, tensor in tensors.items()}
    )


def sequences(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def write(source: TensorSource, folder: Path, weight_format: str) -> Path:
    write_tokenizer_json(folder)
    write_graphs(source, folder, weight_format)
    return folder


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("weight_format", ["float32", "w8a8", "int4"])
def test_graphs_agree_with_the_reference(tmp_path: Path, weight_format: str, changes):
    source = small_source(spec_with(**changes))
    folder = write(source, tmp_path, weight_format)
    token_ids = sequences(61, 23, 8)
    reference = ReferenceModel(source)
    found = compare([reference.forward(ids) for ids in token_ids], run_graphs(folder, source.spec, token_ids))
    assert found.mean_kl <= MAX_KL[weight_format]
    if weight_format == "float32":
        assert found.max_logit_error < 1e-4
        assert found.top1_agreement == 1.0


@pytest.mark.parametrize("weight_format", ["float16", "bfloat16", "int8"])
def test_the_other_formats_agree_too(tmp_path: Path, weight_format: str):
    source = small_source(spec_with(has_qkv_bias=True, has_o_bias=True))
    folder = write(source, tmp_path, weight_format)
    token_ids = sequences(40, 17)
    reference = ReferenceModel(source)
    found = compare([reference.forward(ids) for ids in token_ids], run_graphs(folder, source.spec, token_ids))
    assert found.mean_kl <= MAX_KL[weight_format]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_int4_of_a_quantised_file_costs_what_int8_activations_cost(tmp_path: Path, kind: str):
    """The file's own grid is kept: what is left is far below what a second 4-bit rounding would add."""
    config = tiny_config(vocab_size=256, attention_bias=False, tie_word_embeddings=True)
    kind_of: Callable[[str], GGMLQuantizationType] = lambda name: (  # noqa: E731
        GGMLQuantizationType.Q8_0 if name == "token_embd.weight" else GGMLQuantizationType[kind]
    )
    source = open_source(write_gguf(tmp_path / "tiny.gguf", config, hf_tensors(config), kind_of))
    folder = write(source, tmp_path / "model", "int4")
    token_ids = sequences(50, 20)
    reference = ReferenceModel(source)
    found = compare([reference.forward(ids) for ids in token_ids], run_graphs(folder, source.spec, token_ids))
    assert found.mean_kl < 2e-4


@pytest.mark.parametrize("weight_format", ["w8a8", "int4", "float32"])
def test_prefill_and_decode_compute_the_same_logits(tmp_path: Path, weight_format: str):
    source = small_source(spec_with())
    folder = write(source, tmp_path, weight_format)
    (token_ids,) = sequences(33)
    runner = GraphRunner(folder, source.spec, 8)
    whole = runner.run("prefill", [Chunk(PagedSequence([1, 2, 3]), token_ids)])
    page = PagedSequence([4, 5, 6])
    runner.run("prefill", [Chunk(page, token_ids[:30])])
    stepped = [runner.run("decode", [Chunk(page, [token_id])])[0] for token_id in token_ids[30:]]
    tolerance = 0 if weight_format == "w8a8" else 1e-4
    np.testing.assert_allclose(stepped, whole[30:], rtol=0, atol=tolerance)


def test_w8a8_logits_are_bit_for_bit_the_same_alone_and_in_any_batch(tmp_path: Path):
    source = small_source(spec_with())
    folder = write(source, tmp_path, "w8a8")
    token_ids = sequences(19, 1, 45, 30)
    runner = GraphRunner(folder, source.spec, 24)
    blocks = [[11, 3], [7], [2, 20, 5], [1, 9]]
    alone = [
        runner.run("prefill", [Chunk(PagedSequence(pages), ids)]) for pages, ids in zip(blocks, token_ids, strict=True)
    ]
    moved = [[23, 22], [21], [19, 18, 17], [16, 15]]
    together = runner.run("prefill", [Chunk(PagedSequence(p), ids) for p, ids in zip(moved, token_ids, strict=True)])
    np.testing.assert_array_equal(together, np.concatenate(alone))
