"""Tiny random llama models, written the way their own tools write them: config.json + safetensors, and GGUF."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import save_file

from graphs.rope import RopeSpec
from graphs.spec import ModelSpec
from graphs.tensors import BlockWeights, tensor_shapes

F32 = GGMLQuantizationType.F32
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class MemorySource:
    """A tensor source of random tensors, for specs that no file format here can say."""

    spec: ModelSpec
    tensors: dict[str, np.ndarray]
    path: Path = Path("memory")

    def float32(self, name: str) -> np.ndarray:
        return self.tensors["embed" if name == "head" and self.spec.tie_word_embeddings else name]

    def blocks(self, name: str) -> BlockWeights | None:
        return None


def tiny_spec(**changes: object) -> ModelSpec:
    """A llama of two layers with 50 tokens and 64 positions, whose whole heads are rotated."""
    head_dim = int(str(changes.get("head_dim", 16)))
    spec = ModelSpec(
        name="tiny",
        architecture="llama",
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        context_length=64,
        norm_epsilon=1e-5,
        rope=RopeSpec(10000.0, head_dim),
        tie_word_embeddings=True,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def random_source(spec: ModelSpec, seed: int = 0) -> MemorySource:
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.normal(1.0 if "norm" in name else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in tensor_shapes(spec).items()
    }
    return MemorySource(spec, tensors)


def tiny_config(**changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | changes


def hf_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names of a Hugging Face checkpoint."""
    rng = np.random.default_rng(seed)
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (inter, hidden),
            at + "mlp.up_proj.weight": (inter, hidden),
            at + "mlp.down_proj.weight": (hidden, inter),
        }
        if config["attention_bias"]:
            widths = {"q": q, "k": kv, "v": kv, "o": hidden}
            shapes |= {at + f"self_attn.{part}_proj.bias": (width,) for part, width in widths.items()}
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_hf(
    folder: Path, config: dict, tensors: dict[str, np.ndarray], dtype: object = np.float32, num_shards: int = 1
) -> Path:
    """Write config.json and the tensors; with `dtype` None each in its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = ["model.safetensors"]
    if num_shards > 1:
        files = [f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" for shard in range(num_shards)]
        weight_map = {name: files[place % num_shards] for place, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for shard, file in enumerate(files):
        chosen = names[shard :: len(files)]
        save_file({name: tensors[name].astype(dtype or tensors[name].dtype) for name in chosen}, folder / file)
    return folder


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's conversion of q and k, weights and biases, from half-split to interleaved rows."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def gguf_tensors(config: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model under GGUF's names, with GGUF's row order."""
    renamed = {}
    for name, values in tensors.items():
        if ".layers." not in name:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            renamed[top[name.removesuffix(".weight")] + ".weight"] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        stored = permute(values, config[heads]) if heads else values
        renamed[f"blk.{layer}.{GGUF_LAYER_NAMES[part]}.{kind}"] = stored
    return renamed


def gguf_metadata(config: dict) -> dict[str, object]:
    return {
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def write_gguf(
    path: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    kind_of: Callable[[str], GGMLQuantizationType] = lambda name: F32,
    architecture: str = "llama",
    *,
    extra: dict[str, np.ndarray] | None = None,
    vocabulary: dict[str, list] | None = None,
) -> Path:
    """Write the model of `hf_tensors` as GGUF. `kind_of` chooses a matrix's type by its GGUF name.

    `extra` are more tensors, by their GGUF names, `vocabulary` more metadata.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, entries in (vocabulary or {}).items():
        writer.add_array(key, entries)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    for key, value in gguf_metadata(config).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in gguf_tensors(config, tensors).items():
        kind = kind_of(name) if values.ndim == 2 else F32
        stored = values if kind == F32 else quantize(values, kind)
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
