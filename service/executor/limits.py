"""What an executor is built for, from its configuration, its model and its KV buffer."""

from graphs.manifest import ModelInfo
from service.errors import ConfigError
from service.executor.api import ExecutorLimits
from service.executor.config import ExecutorConfig
from service.executor.kv_layout import KvLayout


def executor_limits(config: ExecutorConfig, model: ModelInfo, layout: KvLayout) -> ExecutorLimits:
    """The limits of `config` on `model`, with the blocks of `layout`. Raises ConfigError."""
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(f"max_model_len: {max_model_len} is more than the model's context of {model.context_length}")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}: {getattr(config, name)} is less than 1")
    return ExecutorLimits(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
