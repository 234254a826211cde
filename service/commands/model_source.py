"""From what --model names to a model folder."""

from pathlib import Path

from graphs.manifest import MANIFEST_NAME, Manifest
from graphs.progress import ProgressBar
from service.commands.weights import CUDA_WEIGHTS, DEFAULT_WEIGHTS
from service.errors import ConfigError


def model_folder(path: Path, weights: str | None, device: str) -> Path:
    """`path` itself when it is a model folder, else the folder that `path` is exported to.

    A GGUF file or Hugging Face folder is exported beside itself, as `NAME-WEIGHTS`, and only when that folder is
    missing or older; without `weights` in a format that suits `device`. Raises ConfigError when `path` is a model
    folder of another weight format, ManifestError and ExportError for damaged input.
    """
    if (path / MANIFEST_NAME).exists():
        found = Manifest.load(path).weight_format
        if weights is not None and weights != found:
            raise ConfigError(f"{path}: holds {found} weights, not {weights}: export its source again, or name that")
        return path
    is_source = path.is_file() or (path / "config.json").is_file()
    if not is_source:
        Manifest.load(path)  # says what is missing
    weight_format = weights or (CUDA_WEIGHTS if device == "cuda" else DEFAULT_WEIGHTS)
    out = path.with_name(f"{path.stem if path.is_file() else path.name}-{weight_format}")
    made = out / MANIFEST_NAME
    if not made.exists() or made.stat().st_mtime < path.stat().st_mtime:
        from graphs.export import export_model  # noqa: PLC0415 slow to import, and seldom needed

        export_model(path, out, weight_format, overwrite=True, progress=ProgressBar())
    return out
