"""Builds the executor that a configuration asks for."""

from graphs.manifest import Manifest, ManifestError
from service.errors import ConfigError, ModelFolderError
from service.executor.api import Executor
from service.executor.config import ExecutorConfig
from service.executor.ort import OrtExecutor

__all__ = ["ExecutorConfig", "create_executor"]


def create_executor(config: ExecutorConfig) -> Executor:
    """Check the model folder, every file's hash included, and load it.

    Raises ModelFolderError when the folder is incomplete, damaged or too new, ConfigError for a setting that this
    machine or model cannot meet.
    """
    if config.device != "cpu":
        raise ConfigError(f"device: {config.device!r} is not supported; use 'cpu'")
    try:
        manifest = Manifest.load(config.model_dir)
        manifest.verify_files(config.model_dir)
    except ManifestError as error:
        raise ModelFolderError(str(error)) from error
    return OrtExecutor(config, manifest)
