"""ModelSpec and RoPE: every limit, both file formats, frequencies against formulas written by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from graphs.errors import ExportError
from graphs.rope import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeSpec
from graphs.spec import ModelSpec
from graphs.spec_config import spec_from_config
from graphs.spec_gguf import spec_from_gguf
from tests.unit.tiny_models import gguf_metadata, tiny_config

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)
SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=128,
    norm_epsilon=1e-5,
    rope=RopeSpec(10000.0, 16),
    tie_word_embeddings=True,
)


def llama3_frequency(frequency: float) -> float:
    """Llama 3.1's rule for one frequency, case by case."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4.0:
        return frequency
    if wavelength > 8192 / 1.0:
        return frequency / 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def test_llama3_scaling_follows_its_rule_in_all_three_ranges() -> None:
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    expected = [llama3_frequency(frequency) for frequency in plain]

    assert expected[0] == plain[0]
    assert expected[-1] == plain[-1] / 8
    assert any(plain[i] / 8 < expected[i] < plain[i] for i in range(64))
    np.testing.assert_allclose(RopeSpec(500000.0, 128, LLAMA3).frequencies(), expected, rtol=1e-14)


def test_gguf_divisors_say_the_same_as_llama3_scaling() -> None:
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    divisors = tuple(frequency / llama3_frequency(frequency) for frequency in plain)

    by_divisors = RopeSpec(500000.0, 128, FrequencyDivisors(divisors)).frequencies()

    np.testing.assert_allclose(by_divisors, RopeSpec(500000.0, 128, LLAMA3).frequencies(), rtol=1e-14)


def test_a_factor_divides_on_top_of_divisors() -> None:
    assert RopeSpec(10000.0, 4, FrequencyDivisors((1.0, 5.0), 2.0)).frequencies().tolist() == [0.5, 0.001]


def test_linear_scaling_divides_every_frequency() -> None:
    assert RopeSpec(10000.0, 4, LinearScaling(4.0)).frequencies().tolist() == [0.25, 0.0025]


def test_tables_are_float32_roundings_of_exact_angles_at_late_positions() -> None:
    cos, sin = RopeSpec(10000.0, 4).tables(100_001)

    assert (cos.dtype, cos.shape, sin.shape) == (np.float32, (100_001, 2), (100_001, 2))
    assert cos[0].tolist() == [1.0, 1.0]
    assert cos[100_000].tolist() == [np.float32(math.cos(100_000)), np.float32(math.cos(1000))]
    assert sin[3].tolist() == [np.float32(math.sin(3)), np.float32(math.sin(0.03))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: 0 is not allowed: 1 to 4096"),
        ({"num_layers": 4097}, "num_layers: 4097 is not allowed: 1 to 4096"),
        ({"vocab_size": 2**31}, "vocab_size: 2147483648 is not allowed: 1 to 2147483647"),
        ({"head_dim": 257}, "head_dim: 257 is not allowed: 1 to 256"),
        ({"context_length": 2**24 + 1}, "context_length: 16777217 is not allowed: 1 to 16777216"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3 is not allowed: a divisor of num_heads (4)"),
        ({"rope": RopeSpec(10000.0, 18)}, "rope rotary_dim: 18 is not allowed: at most head_dim (16)"),
        ({"norm_epsilon": 0.0}, "norm_epsilon: 0.0 is not allowed: above 0 and below 1"),
        ({"softcap": math.nan}, "softcap: nan is not allowed: a finite number, at least 0"),
        ({"sliding_window": 0}, "sliding_window: 0 is not allowed: 1 to 2147483647"),
        ({"activation": "gelu"}, "activation: 'gelu' is not allowed: 'silu' is the only one known"),
        ({"bos_token_id": 40}, "bos_token_id: 40 is not allowed: 0 to 39 (vocab_size - 1)"),
        ({"eos_token_ids": (2, 40)}, "eos_token_ids: 40 is not allowed: 0 to 39 (vocab_size - 1)"),
        ({"eos_token_ids": (2, -1)}, "eos_token_ids: -1 is not allowed: 0 to 39 (vocab_size - 1)"),
    ],
)
def test_a_value_outside_its_limit_is_refused_with_field_value_and_limit(change: dict, message: str) -> None:
    with pytest.raises(ExportError) as refusal:
        replace(SPEC, **change)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 4096},
        {"head_dim": 256},
        {"context_length": 2**24},
        {"num_kv_heads": 4},
        {"bos_token_id": 39},
        {"eos_token_ids": (39,)},
        {"sliding_window": 1},
    ],
)
def test_a_value_at_its_limit_is_taken(change: dict) -> None:
    (field, value), spec = *change.items(), replace(SPEC, **change)
    assert getattr(spec, field) == value


@pytest.mark.parametrize(
    ("theta", "rotary_dim", "scaling", "message"),
    [
        (0.0, 16, None, "rope theta: 0.0"),
        (math.inf, 16, None, "rope theta: inf"),
        (1e4, 15, None, "rope rotary_dim: 15 is not allowed: an even number"),
        (1e4, 0, None, "rope rotary_dim: 0"),
        (1e4, 16, LinearScaling(0.0), "rope scaling factor: 0.0"),
        (1e4, 16, replace(LLAMA3, original_context_length=2**31), "original_max_position_embeddings: 2147483648"),
        (1e4, 16, replace(LLAMA3, original_context_length=0), "original_max_position_embeddings: 0 is not allowed"),
        (1e4, 16, replace(LLAMA3, high_freq_factor=1.0), "high_freq_factor: 1.0 is not allowed: above low_freq_factor"),
        (1e4, 16, FrequencyDivisors((1.0,) * 7), "7 values, but rotary_dim / 2 is 8"),
        (1e4, 16, FrequencyDivisors((1.0,) * 7 + (-1.0,)), "rope scaling divisor: -1.0"),
    ],
)
def test_rope_refuses_what_has_no_meaning(theta: float, rotary_dim: int, scaling: object, message: str) -> None:
    with pytest.raises(ExportError) as refusal:
        RopeSpec(theta, rotary_dim, scaling)  # type: ignore[arg-type]
    assert message in str(refusal.value)


def test_config_yields_every_field() -> None:
    config = tiny_config(rope_scaling={"rope_type": "linear", "factor": 2.0}, eos_token_id=[2, 7])

    expected = replace(
        SPEC,
        rope=RopeSpec(10000.0, 16, LinearScaling(2.0)),
        tie_word_embeddings=False,
        has_qkv_bias=True,
        has_o_bias=True,
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )
    assert spec_from_config(config, "tiny") == expected


def test_config_defaults_follow_the_architecture() -> None:
    names = ("num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "tie_word_embeddings", "hidden_act")
    config = {key: value for key, value in tiny_config(eos_token_id=None).items() if key not in names}

    spec = spec_from_config(config, "tiny")

    assert (spec.num_kv_heads, spec.head_dim, spec.rope) == (4, 16, RopeSpec(10000.0, 16))
    assert (spec.has_qkv_bias, spec.tie_word_embeddings, spec.eos_token_ids) == (False, False, ())


def test_llama3_scaling_is_read_in_the_old_and_the_new_spelling() -> None:
    values = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = tiny_config(rope_theta=500000.0, rope_scaling=values)
    new = tiny_config(rope_theta=None, rope_parameters=values | {"rope_theta": 500000.0})

    assert spec_from_config(old, "a").rope == RopeSpec(500000.0, 16, LLAMA3)
    assert spec_from_config(new, "a").rope == RopeSpec(500000.0, 16, LLAMA3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures: ['GPT2LMHeadModel'] is not known: one of 'LlamaForCausalLM'",
        ),
        ({"architectures": None}, "architectures: None is not known: one of 'LlamaForCausalLM'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not allowed: an integer"),
        ({"vocab_size": True}, "vocab_size: True is not allowed: an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not allowed: at least 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: 'small' is not allowed: a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: nan is not allowed: a finite number"),
        (
            {"rope_theta": 10**400},
            "rope_theta: 100000000000000000...0000000000000000000 is not allowed: a finite number",
        ),
        ({"head_dim": 2**63}, "head_dim: 9223372036854775808 is not allowed: at most 9223372036854775807"),
        ({"partial_rotary_factor": math.nan}, "partial_rotary_factor: nan is not allowed: a finite number"),
        ({"partial_rotary_factor": -math.inf}, "partial_rotary_factor: -inf is not allowed: a finite number"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor: 1e+308 is not allowed: above 0, at most 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor: 0.0 is not allowed: above 0, at most 1"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type: 'yarn' is not known: 'default', 'linear' or 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": 3}, "rope_scaling: 3 is not allowed: a mapping"),
        ({"mlp_bias": True}, "mlp_bias: True is not allowed: biases in the MLP are not known"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not known"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id: 'x' is not allowed: an integer"),
        ({"attention_bias": "no"}, "attention_bias: 'no' is not allowed: true or false"),
    ],
)
def test_config_refusals_name_the_key(change: dict, message: str) -> None:
    with pytest.raises(ExportError) as refusal:
        spec_from_config(tiny_config(**change), "tiny")
    assert message in str(refusal.value)


SHAPES = {"token_embd.weight": (40, 64)}


def metadata(**changes: object) -> dict[str, object]:
    """Metadata of the tiny model; a change names its key with two underscores for each dot."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return {"general.architecture": "llama"} | gguf_metadata(tiny_config()) | changed


def test_gguf_metadata_yields_every_field() -> None:
    spec = spec_from_gguf(metadata(), SHAPES, None, "tiny")
    assert spec == replace(SPEC, bos_token_id=1, eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, (True, False, False)),
        ({"output.weight": (40, 64)}, (False, False, False)),
        ({"blk.1.attn_q.bias": (64,)}, (True, True, False)),
        ({"blk.0.attn_v.bias": (32,)}, (True, True, False)),
        ({"blk.1.attn_output.bias": (64,)}, (True, False, True)),
    ],
)
def test_gguf_tensors_of_any_layer_decide_head_and_biases(tensors: dict, expected: tuple[bool, bool, bool]) -> None:
    spec = spec_from_gguf(metadata(), SHAPES | tensors, None, "tiny")
    assert (spec.tie_word_embeddings, spec.has_qkv_bias, spec.has_o_bias) == expected


def test_gguf_defaults_follow_llama_cpp() -> None:
    optional = ("head_count_kv", "key_length", "value_length", "freq_base", "dimension_count")
    bare = {key: value for key, value in metadata().items() if not key.endswith(optional)}

    spec = spec_from_gguf(bare, SHAPES, None, "tiny")

    assert (spec.num_kv_heads, spec.head_dim, spec.rope) == (4, 16, RopeSpec(10000.0, 16))


def test_gguf_values_per_layer_count_when_all_are_alike() -> None:
    alike = spec_from_gguf(metadata(llama__attention__head_count_kv=[2, 2]), SHAPES, None, "tiny")
    assert alike.num_kv_heads == 2
    with pytest.raises(ExportError, match=r"llama\.attention\.head_count_kv: \[2, 4\] is not allowed: an integer"):
        spec_from_gguf(metadata(llama__attention__head_count_kv=[2, 4]), SHAPES, None, "tiny")


def test_gguf_rope_scaling_by_factor_by_divisors_and_by_both() -> None:
    divisors = tuple(range(1, 9))
    linear = metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    named_none = metadata(llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0)

    def scaling(values: dict, factors: tuple[float, ...] | None) -> object:
        return spec_from_gguf(values, SHAPES, factors, "tiny").rope.scaling

    assert scaling(linear, None) == LinearScaling(4.0)
    assert scaling(metadata(llama__rope__scale_linear=2.0), None) == LinearScaling(2.0)
    assert scaling(named_none, None) is None
    assert scaling(metadata(), divisors) == FrequencyDivisors(divisors)
    assert scaling(linear, divisors) == FrequencyDivisors(divisors, 4.0)


def test_gguf_ends_at_each_of_its_end_tokens_once() -> None:
    ends = metadata(tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=2)
    assert spec_from_gguf(ends, SHAPES, None, "tiny").eos_token_ids == (2, 7)


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"])
def test_gguf_ends_at_control_tokens_that_are_spelled_as_an_end(end: str) -> None:
    control, user_defined, normal = 3, 4, 1
    tokens = ["a", "<|start|>", "</s>", end]

    def end_ids(kind: int) -> tuple[int, ...]:
        vocabulary = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1, control, control, kind]}
        return spec_from_gguf(metadata(**vocabulary), SHAPES, None, "tiny").eos_token_ids

    assert end_ids(control) == (2, 3)
    assert end_ids(user_defined) == end_ids(normal) == (2,)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__attention__causal": True},
        {"llama__attention__scale": 0.25},  # 1 / sqrt(16), what it is anyway
        {"llama__rope__scaling__attn_factor": np.float32(1)},
        {"llama__logit_scale": 1.0},
    ],
)
def test_gguf_keys_that_change_nothing_are_taken(changes: dict) -> None:
    assert spec_from_gguf(metadata(**changes), SHAPES, None, "tiny") == spec_from_gguf(metadata(), SHAPES, None, "tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture: 'mamba' is not known: one of 'llama'"),
        ({"general__architecture": None}, "general.architecture is missing"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__expert_count": 8}, "llama.expert_count: 8 is not allowed: mixtures of experts are not known"),
        ({"split__count": 2}, "split.count: the file is one part of a split model"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length: 8 is not allowed"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count: 0 is not allowed: at least 1"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "llama.rope.scaling.attn_factor: 1.5 is not allowed: 1"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale: 0.5 is not allowed: 0 or 0.25"),
        ({"llama__attention__causal": False}, "llama.attention.causal: False is not allowed: True"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping: 30.0 is not allowed: 0"),
        ({"tokenizer__ggml__tokens": "ab"}, "tokenizer.ggml.tokens: 'ab' is not allowed: a list"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type: 'yarn' is not known: 'none' or 'linear'"),
    ],
)
def test_gguf_refusals_name_the_key(changes: dict, message: str) -> None:
    with pytest.raises(ExportError) as refusal:
        spec_from_gguf(metadata(**changes), SHAPES, None, "tiny")
    assert message in str(refusal.value)
