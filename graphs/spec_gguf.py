"""ModelSpec from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from graphs.errors import ExportError
from graphs.fields import Fields
from graphs.rope import FrequencyDivisors, LinearScaling, RopeScaling, RopeSpec
from graphs.spec import ModelSpec

ARCHITECTURES = ("llama",)
_TOKENS, _TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
VOCABULARY_KEYS: Final = (_TOKENS, _TOKEN_TYPES)
"""The lists with an entry for each token that a ModelSpec is read from."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL = 3  # the type of a token that stands for no text
# How families of models spell the token that ends a turn or a text. Many files name but one of theirs by a key.
_END_OF_TURN = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<EOT>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
}
_END_TOKENS = _END_OF_TURN | {"<|endoftext|>", "<|end_of_text|>", "</s>"}
# What would change the computation, under the architecture's name, and the values that leave it as it is.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window_pattern": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "use_parallel_residual": (False,),
}


def spec_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    frequency_divisors: tuple[float, ...] | None,
    name: str,
) -> ModelSpec:
    """Describe the model. `shapes` are the file's tensors by their own names, [out_features, in_features].

    `frequency_divisors` are the values of `rope_freqs.weight`, if the file has it. Raises ExportError naming the key.
    """
    fields = Fields(metadata)
    arch = _architecture(fields)
    hidden_size = fields.integer(f"{arch}.embedding_length")
    num_heads = fields.integer(f"{arch}.attention.head_count")
    head_dim = _head_dim(fields, arch, hidden_size, num_heads)
    return ModelSpec(
        name=name,
        architecture=arch,
        vocab_size=_vocab_size(shapes),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
        num_layers=fields.integer(f"{arch}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=fields.integer(f"{arch}.context_length"),
        norm_epsilon=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, arch, head_dim, frequency_divisors),
        tie_word_embeddings="output.weight" not in shapes,
        has_qkv_bias=_has_bias(shapes, "attn_q", "attn_k", "attn_v"),
        has_o_bias=_has_bias(shapes, "attn_output"),
        sliding_window=fields.optional_integer(f"{arch}.attention.sliding_window") or None,
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_token_ids(fields),
    )


def _architecture(fields: Fields) -> str:
    """The family's name. Raises ExportError when it is not known, or the file is one that no graph here computes."""
    arch = fields.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise ExportError(f"general.architecture: {arch!r} is not known: one of {', '.join(map(repr, ARCHITECTURES))}")
    fields.refuse(f"{arch}.expert_count", "mixtures of experts are not known")
    if fields.integer("split.count", 0) > 1:
        raise ExportError("split.count: the file is one part of a split model; merge the parts first")
    for name, neutral in _NEUTRAL.items():
        fields.require_one_of(f"{arch}.{name}", neutral)
    return arch


def _has_bias(shapes: Mapping[str, tuple[int, ...]], *parts: str) -> bool:
    """Whether any layer has a bias for any of `parts`; then all must have one for each."""
    return any(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in shapes)


def _vocab_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    # The table decides: some files carry no vocab_size, and the token list may be shorter than a padded table.
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise ExportError("tensor token_embd.weight is missing")
    return shape[0]


def _head_dim(fields: Fields, arch: str, hidden_size: int, num_heads: int) -> int:
    if num_heads < 1:
        raise ExportError(f"{arch}.attention.head_count: {num_heads} is not allowed: at least 1")
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden_size // num_heads)
    value_dim = fields.integer(f"{arch}.attention.value_length", head_dim)
    if value_dim != head_dim:
        key = f"{arch}.attention.value_length"
        raise ExportError(f"{key}: {value_dim} is not allowed: equal to attention.key_length ({head_dim})")
    if head_dim > 0:
        fields.require_one_of(f"{arch}.attention.scale", (0, float(np.float32(head_dim**-0.5))))
    return head_dim


def _rope(fields: Fields, arch: str, head_dim: int, divisors: tuple[float, ...] | None) -> RopeSpec:
    kind = fields.text(f"{arch}.rope.scaling.type", "")
    factor = fields.number(f"{arch}.rope.scaling.factor", fields.number(f"{arch}.rope.scale_linear", 1.0))
    is_linear = kind == "linear" or (not kind and factor != 1.0)
    if kind not in ("", "none", "linear"):
        raise ExportError(f"{arch}.rope.scaling.type: {kind!r} is not known: 'none' or 'linear'")
    scaling: RopeScaling | None = None
    if divisors is not None:
        scaling = FrequencyDivisors(divisors, factor if is_linear else 1.0)
    elif is_linear:
        scaling = LinearScaling(factor)
    return RopeSpec(
        theta=fields.number(f"{arch}.rope.freq_base", 10000.0),
        rotary_dim=fields.integer(f"{arch}.rope.dimension_count", head_dim),
        scaling=scaling,
    )


def _end_token_ids(fields: Fields) -> tuple[int, ...]:
    """What the keys name, then the control tokens that are spelled as an end."""
    named = (fields.optional_integer(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    tokens, types = fields.entries(_TOKENS), fields.entries(_TOKEN_TYPES)
    spelled = (
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and isinstance(token, str) and token in _END_TOKENS
    )
    return tuple(dict.fromkeys(token_id for token_id in (*named, *spelled) if token_id is not None))
