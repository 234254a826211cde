"""Builds the executor that a configuration asks for."""

from graphs.manifest import Manifest, ManifestError
from service.errors import ConfigError, ModelFolderError
from service.executor.api import Executor
from service.executor.config import ExecutorConfig
from service.executor.cuda.probe import has_cuda_package, require_cuda
from service.executor.kv_layout import parse_kv_memory
from service.executor.machine import available_memory_bytes
from service.executor.ort import OrtExecutor

__all__ = ["ExecutorConfig", "create_executor"]


def create_executor(config: ExecutorConfig) -> Executor:
    """Check the model folder, every file's hash included, and load it.

    Raises ModelFolderError when the folder is incomplete, damaged or too new, ConfigError for a setting that this
    machine or model cannot meet.
    """
    if config.device == "cpu" and parse_kv_memory(config.host_kv_memory, available_memory_bytes(), "host_kv_memory"):
        raise ConfigError(
            f"host_kv_memory: {config.host_kv_memory!r} is for device cuda; a CPU's KV buffer, kv_memory, is in host "
            "memory already"
        )
    if config.device not in {"cpu", "cuda"}:
        raise ConfigError(f"device: {config.device!r} is none of cpu, cuda")
    try:
        manifest = Manifest.load(config.model_dir)
        if config.device == "cuda":
            _require_cuda(config, manifest)  # before a large model is read in vain
        manifest.verify_files(config.model_dir)
    except ManifestError as error:
        raise ModelFolderError(str(error)) from error
    if config.device == "cuda":
        # Only here: it needs packages that machines without a GPU may lack.
        from service.executor.cuda.assembly import create_cuda_executor  # noqa: PLC0415

        return create_cuda_executor(config, manifest)
    return OrtExecutor(config, manifest)


def _require_cuda(config: ExecutorConfig, manifest: Manifest) -> None:
    """Raise ConfigError for what no GPU could serve, which is told first, or for what this machine lacks."""
    if has_cuda_package():
        from service.executor.cuda.requirements import require_cuda_model  # noqa: PLC0415 needs that package

        require_cuda_model(config, manifest)
    require_cuda()
