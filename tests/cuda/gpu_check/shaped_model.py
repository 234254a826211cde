"""Model folders of given dimensions with repeated random weights: their steps cost what real ones do."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.export import model_info, write_graphs
from graphs.manifest import REQUIRED_FILES, FileRecord, Manifest
from graphs.rope import RopeSpec
from graphs.spec import ModelSpec
from graphs.tensors import BlockWeights, tensor_shapes
from tests.unit.tiny_export import write_tokenizer_json

NUM_RANDOM = 1 << 20  # numbers that are drawn; tensors are filled with copies of them


@dataclass(frozen=True)
class ShapedSource:
    """A tensor source; a tensor is made when it is asked for."""

    spec: ModelSpec
    path: Path = Path("random")

    def float32(self, name: str) -> np.ndarray:
        shape = tensor_shapes(self.spec)["embed" if name == "head" and self.spec.tie_word_embeddings else name]
        if "norm" in name:
            return np.ones(shape, np.float32)
        # So small that a sum over a row stays near 1.
        numbers = np.random.default_rng(len(name)).standard_normal(NUM_RANDOM, np.float32) / np.float32(
            shape[-1] ** 0.5
        )
        return np.resize(numbers, shape)

    def blocks(self, name: str) -> BlockWeights | None:
        return None


def shaped_spec(name: str, hidden: int, inter: int, layers: int, heads: tuple[int, int, int], vocab: int) -> ModelSpec:
    """`heads`: query heads, KV heads, head dimension."""
    num_heads, num_kv_heads, head_dim = heads
    return ModelSpec(
        name=name,
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=4096,
        norm_epsilon=1e-5,
        rope=RopeSpec(10_000.0, head_dim),
        tie_word_embeddings=True,
    )


def write_model(spec: ModelSpec, folder: Path) -> Path:
    """A float16 model folder that nobody has verified."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer_json(folder)
    write_graphs(ShapedSource(spec), folder, "float16")
    files = {name: FileRecord.of(folder / name) for name in REQUIRED_FILES}
    Manifest(model_info(spec, add_bos=False), "float16", files).save(folder)
    return folder
