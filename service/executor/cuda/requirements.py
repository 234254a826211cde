"""What the CUDA path cannot do, told before anything is loaded. Dimensions are the kernels' own affair."""

from graphs.manifest import Manifest
from service.errors import ConfigError
from service.executor.config import ExecutorConfig
from service.executor.cuda.plan_layout import DECODE_ROWS
from service.executor.cuda.precision import Precision


def require_cuda_model(config: ExecutorConfig, manifest: Manifest) -> Precision:
    """The number types of a model on cuda. Raises ConfigError for what the CUDA path has nothing for."""
    model = manifest.model
    if model.num_heads > DECODE_ROWS * model.num_kv_heads:
        raise ConfigError(
            f"num_heads: {model.num_heads} for {model.num_kv_heads} KV heads do not run on cuda: "
            f"at most {DECODE_ROWS} for each"
        )
    return Precision.choose(config.kv_dtype, manifest)
