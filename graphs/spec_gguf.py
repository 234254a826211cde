"""ModelSpec from the metadata of a GGUF file."""

from collections.abc import Mapping

from graphs.errors import ExportError
from graphs.fields import Fields
from graphs.rope import FrequencyDivisors, LinearScaling, RopeScaling, RopeSpec
from graphs.spec import ModelSpec

ARCHITECTURES = ("llama",)
# What llama.cpp assumes when tokenizer.ggml.add_bos_token is missing: SentencePiece vocabularies and Llama 3's do.
_BOS_MODELS = ("llama",)
_BOS_PRETOKENIZERS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


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
    arch = fields.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise ExportError(f"general.architecture: {arch!r} is not known: one of {', '.join(map(repr, ARCHITECTURES))}")
    fields.refuse(f"{arch}.expert_count", "mixtures of experts are not known")
    if fields.integer("split.count", 0) > 1:
        raise ExportError("split.count: the file is one part of a split model; merge the parts first")
    hidden_size = fields.integer(f"{arch}.embedding_length")
    num_heads = fields.integer(f"{arch}.attention.head_count")
    head_dim = _head_dim(fields, arch, hidden_size, num_heads)
    bos_token_id = fields.optional_integer("tokenizer.ggml.bos_token_id")
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
        has_qkv_bias="blk.0.attn_q.bias" in shapes,
        has_o_bias="blk.0.attn_output.bias" in shapes,
        sliding_window=fields.optional_integer(f"{arch}.attention.sliding_window") or None,
        bos_token_id=bos_token_id,
        eos_token_ids=_end_token_ids(fields),
        add_bos=bos_token_id is not None and _adds_bos(fields),
    )


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
    ids = (fields.optional_integer(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _adds_bos(fields: Fields) -> bool:
    by_default = (
        fields.text("tokenizer.ggml.model", "") in _BOS_MODELS
        or fields.text("tokenizer.ggml.pre", "") in _BOS_PRETOKENIZERS
    )
    return fields.flag("tokenizer.ggml.add_bos_token", by_default)
