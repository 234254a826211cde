"""Builds the executor that a configuration asks for."""

from graphs.manifest import Manifest, ManifestError
from service.errors import ConfigError, ModelFolderError
from service.executor.api import Executor
from service.executor.config import ExecutorConfig
from service.executor.cuda.probe import require_cuda
from service.executor.ort import OrtExecutor

__all__ = ["ExecutorConfig", "create_executor"]


def create_executor(config: ExecutorConfig) -> Executor:
    """Check the model folder, every file's hash included, and load it.

    Raises ModelFolderError when the folder is incomplete, damaged or too new, ConfigError for a setting that this
    machine or model cannot meet.
    """
    if config.device == "cuda":
        require_cuda()  # before a large model is read in vain
    elif config.device != "cpu":
        raise ConfigError(f"device: {config.device!r} is none of cpu, cuda")
    try:
        manifest = Manifest.load(config.model_dir)
        manifest.verify_files(config.model_dir)
    except ManifestError as error:
        raise ModelFolderError(str(error)) from error
    if config.device == "cuda":
        # Only here: it needs packages that machines without a GPU may lack.
        from service.executor.cuda.assembly import create_cuda_executor  # noqa: PLC0415

        return create_cuda_executor(config, manifest)
    return OrtExecutor(config, manifest)
