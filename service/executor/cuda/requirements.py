"""What the CUDA path cannot do, told before anything is loaded. Dimensions are the kernels' own affair."""

from typing import Final

from graphs.manifest import Manifest
from service.errors import ConfigError
from service.executor.config import ExecutorConfig
from service.executor.cuda.attention_plan import DECODE_ROWS
from service.executor.kv_layout import KvDtype

WEIGHT_FORMAT: Final = "float16"


def require_cuda_model(config: ExecutorConfig, manifest: Manifest) -> None:
    """Raise ConfigError for a model or setting that the CUDA path has nothing for."""
    model = manifest.model
    if manifest.weight_format != WEIGHT_FORMAT:
        raise ConfigError(
            f"weight format: {manifest.weight_format!r} does not run on cuda: export the model in {WEIGHT_FORMAT!r}"
        )
    if model.num_heads > DECODE_ROWS * model.num_kv_heads:
        raise ConfigError(
            f"num_heads: {model.num_heads} for {model.num_kv_heads} KV heads do not run on cuda: "
            f"at most {DECODE_ROWS} for each"
        )
    if config.kv_dtype not in {"auto", KvDtype.FLOAT16}:
        raise ConfigError(f"kv_dtype: {config.kv_dtype!r} does not run on cuda: auto or float16")
