"""What the CUDA path cannot do, told before anything is allocated. Dimensions are the kernels' own affair."""

from typing import Final

from graphs.manifest import Manifest
from service.errors import ConfigError
from service.executor.api import ExecutorLimits
from service.executor.config import ExecutorConfig
from service.executor.cuda.plan_layout import DECODE_ROWS, PlanLimits
from service.executor.cuda.precision import Precision

_MAX_GRID_Y: Final = 65_535  # blocks of a launch
_MAX_TABLE: Final = (1 << 31) - 1  # entries, whose places kernels hold in an int


def require_cuda_model(config: ExecutorConfig, manifest: Manifest) -> Precision:
    """The number types of a model on cuda. Raises ConfigError for what the CUDA path has nothing for."""
    model = manifest.model
    if model.num_heads > DECODE_ROWS * model.num_kv_heads:
        raise ConfigError(
            f"num_heads: {model.num_heads} for {model.num_kv_heads} KV heads do not run on cuda: "
            f"at most {DECODE_ROWS} for each"
        )
    return Precision.choose(config.kv_dtype, manifest)


def require_step_size(limits: ExecutorLimits, mixed: PlanLimits) -> None:
    """Raises ConfigError for steps that a launch cannot hold, or a block table that kernels cannot number.

    `mixed`: of plans with prefill, an item of which is a block in y of attn_prefill.
    """
    if mixed.max_prefill_items > _MAX_GRID_Y:
        raise ConfigError(
            f"max_num_batched_tokens: {mixed.max_tokens:,} tokens may be {mixed.max_prefill_items:,} items of "
            f"attention in a step, and a launch on cuda holds at most {_MAX_GRID_Y:,}"
        )
    blocks_each = -(-limits.max_model_len // limits.block_size)
    if limits.max_num_seqs * blocks_each > _MAX_TABLE:
        raise ConfigError(
            f"max_num_seqs: {limits.max_num_seqs:,} sequences of up to {blocks_each:,} blocks are more than the "
            f"{_MAX_TABLE:,} entries that a block table may have on cuda"
        )
