"""What the CUDA path computes in, and what it refuses, by name."""

from dataclasses import replace

import pytest

from graphs.manifest import Manifest
from service.errors import ConfigError
from service.executor.api import ExecutorLimits
from service.executor.cuda.kernels import Scalar
from service.executor.cuda.plan_layout import PlanLimits
from service.executor.cuda.precision import Precision
from service.executor.cuda.requirements import require_cuda_model, require_step_size
from service.executor.kv_layout import KvDtype
from tests.cuda.conftest import CONFIG

HALF, BF16 = Scalar.HALF, Scalar.BF16


@pytest.mark.parametrize(
    ("weights", "dtype", "kv_dtype", "expected"),
    [
        ("float16", "bfloat16", "auto", Precision(HALF, KvDtype.FLOAT16)),
        ("float16", None, "float16", Precision(HALF, KvDtype.FLOAT16)),
        ("bfloat16", "bfloat16", "auto", Precision(BF16, KvDtype.BFLOAT16)),
        ("bfloat16", "float16", "fp8", Precision(BF16, KvDtype.FP8)),
        ("int8", "float16", "fp8", Precision(HALF, KvDtype.FP8)),
        ("int4", "float16", "auto", Precision(HALF, KvDtype.FLOAT16)),
        ("int8", "bfloat16", "fp8", Precision(BF16, KvDtype.FP8)),
        ("int4", "bfloat16", "auto", Precision(BF16, KvDtype.BFLOAT16)),
        ("int4", "float32", "auto", Precision(BF16, KvDtype.BFLOAT16)),
        ("int8", None, "bfloat16", Precision(BF16, KvDtype.BFLOAT16)),
    ],
)
def test_what_a_model_computes_in_follows_from_its_weights(tiny_float16, weights, dtype, kv_dtype, expected) -> None:
    """`dtype` is the source's; a GGUF file has none, nor had folders before manifests had."""
    source = {"dtype": dtype} if dtype else {}
    manifest = replace(Manifest.load(tiny_float16), weight_format=weights, source=source)
    assert expected == require_cuda_model(replace(CONFIG, kv_dtype=kv_dtype), manifest)


@pytest.mark.parametrize(
    ("weights", "kv_dtype", "message"),
    [
        ("w8a8", "auto", "weight format: 'w8a8' does not run on cuda: export the model as one of float16, bfloat16"),
        ("float32", "auto", "weight format: 'float32' does not run on cuda"),
        ("float16", "int8", "kv_dtype: 'int8' does not run on cuda with float16 weights: auto, float16 or fp8"),
        ("float16", "bfloat16", "kv_dtype: 'bfloat16' does not run on cuda with float16 weights"),
        ("bfloat16", "float16", "kv_dtype: 'float16' .* with bfloat16 weights: auto, bfloat16 or fp8"),
        ("int8", "float16", "kv_dtype: 'float16' .* with int8 weights of a model that is not in float16: auto, bfl"),
    ],
)
def test_types_that_do_not_go_together_are_refused_by_name(tiny_float16, weights, kv_dtype, message: str) -> None:
    manifest = replace(Manifest.load(tiny_float16), weight_format=weights)
    with pytest.raises(ConfigError, match=message):
        require_cuda_model(replace(CONFIG, kv_dtype=kv_dtype), manifest)


def test_more_query_heads_than_a_tile_has_rows_are_refused(tiny_float16) -> None:
    manifest = Manifest.load(tiny_float16)
    model = manifest.model
    require_cuda_model(CONFIG, replace(manifest, model=replace(model, num_heads=16, num_kv_heads=1)))
    with pytest.raises(ConfigError, match="num_heads: 17 for 1 KV heads do not run on cuda: at most 16 for each"):
        require_cuda_model(CONFIG, replace(manifest, model=replace(model, num_heads=17, num_kv_heads=1)))


def step_limits(num_seqs: int, num_tokens: int, model_len: int) -> tuple[ExecutorLimits, PlanLimits]:
    limits = ExecutorLimits(100, 16, num_seqs, num_tokens, model_len)
    plan = PlanLimits(10, 8, num_seqs, num_tokens, model_len, prefill_rows=64, resident_prefill_blocks=35)
    return limits, plan


def test_more_prefill_items_than_a_grid_has_blocks_are_refused() -> None:
    """Of 64 rows: 524,000 tokens of 8 heads fill 65,500 items; a last one may be partial, and cuts make 35 more."""
    require_step_size(*step_limits(1, 523_992, 4096))
    message = "max_num_batched_tokens: 524,000 tokens may be 65,536 items .* holds at most 65,535"
    with pytest.raises(ConfigError, match=message):
        require_step_size(*step_limits(1, 524_000, 4096))


def test_a_block_table_whose_places_an_int_cannot_hold_is_refused() -> None:
    """2^31 / 2^20 = 2048 rows of 2^20 blocks."""
    require_step_size(*step_limits(2047, 4096, 1 << 24))
    with pytest.raises(ConfigError, match=r"max_num_seqs: 2,048 sequences of up to 1,048,576 blocks .* 2,147,483,647"):
        require_step_size(*step_limits(2048, 4096, 1 << 24))
