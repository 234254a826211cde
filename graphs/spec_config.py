"""ModelSpec from the config.json of a Hugging Face folder."""

from collections.abc import Mapping

from graphs.errors import ExportError
from graphs.fields import Fields
from graphs.rope import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec
from graphs.spec import ModelSpec

ARCHITECTURES = {"LlamaForCausalLM": "llama"}


def spec_from_config(
    config: Mapping[str, object],
    name: str,
    *,
    eos_token_ids: tuple[int, ...] | None = None,
) -> ModelSpec:
    """Describe the model. `eos_token_ids` takes the place of the config's own. Raises ExportError naming the key."""
    fields = Fields(config)
    architecture = _architecture(fields)
    fields.refuse("quantization_config", "quantised checkpoints are not known; export the original")
    fields.refuse("mlp_bias", "biases in the MLP are not known")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        raise ExportError(f"num_attention_heads: {num_heads} is not allowed: at least 1")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    has_attention_bias = fields.flag("attention_bias", False)
    return ModelSpec(
        name=name,
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_length=fields.integer("max_position_embeddings"),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, head_dim),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
        activation=fields.text("hidden_act", "silu"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_ids=token_ids(fields, "eos_token_id") if eos_token_ids is None else eos_token_ids,
    )


def token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Yield one id, a list of ids, or nothing as a tuple. Raises ExportError."""
    value = fields.get(key)
    if not isinstance(value, list):
        return () if value is None else (fields.integer(key),)
    return tuple(Fields({key: item}).integer(key) for item in value)


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ExportError(f"architectures: {names!r} is not known: one of {', '.join(map(repr, ARCHITECTURES))}")
    return ARCHITECTURES[name]


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    # Older configs keep theta at the top and the rest in rope_scaling, newer ones all of it in rope_parameters.
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({})
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise ExportError(f"partial_rotary_factor: {share!r} is not allowed: above 0, at most 1")
    return RopeSpec(theta=theta, rotary_dim=int(head_dim * share), scaling=_scaling(scaling))


def _scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_context_length=fields.integer("original_max_position_embeddings"),
            )
    raise ExportError(f"rope_type: {kind!r} is not known: 'default', 'linear' or 'llama3'")
