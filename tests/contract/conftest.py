"""A tiny random llama, exported in every weight format, and a way to run requests on an executor."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from graphs.export import export_model
from tests.stepping import Outcome, run_requests

VOCAB_SIZE = 96
NUM_LAYERS = 2
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 128, 192, 4, 2, 32
CONTEXT_LENGTH = 128


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights, large enough in scale that greedy choices have clear gaps."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(11)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
            f"{prefix}.post_attention_layernorm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    save_file(tensors, folder / "model.safetensors")
    # One token per printable character, so that calibration texts become varied tokens.
    tokenizer = Tokenizer(models.WordLevel({chr(32 + index): index for index in range(VOCAB_SIZE)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny_export(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from weight format to an exported model folder of the tiny llama, made once."""
    folders: dict[str, Path] = {}

    def folder(weight_format: str) -> Path:
        if weight_format not in folders:
            out = tmp_path_factory.mktemp("exports") / weight_format
            export_model(tiny_llama, out, weight_format)
            folders[weight_format] = out
        return folders[weight_format]

    return folder


@pytest.fixture(scope="session")
def run() -> Callable[..., Outcome]:
    return run_requests
