"""From what --model names to a model folder."""

from collections.abc import Callable
from pathlib import Path

from graphs.fingerprint import source_fingerprint, source_name
from graphs.manifest import MANIFEST_NAME, Manifest, ManifestError
from graphs.progress import ProgressBar
from service.commands.weights import CUDA_WEIGHTS, DEFAULT_WEIGHTS
from service.errors import ConfigError
from service.executor.machine import available_memory_bytes


def model_folder(
    path: Path, weights: str | None, device: str, before_export: Callable[[], object] | None = None
) -> Path:
    """`path` itself when it is a model folder, else the folder that `path` is exported to.

    A GGUF file or Hugging Face folder is exported beside itself, as `NAME-WEIGHTS`, and only when that folder is
    missing, or was made before the source changed; without `weights` in a format that suits `device`. Before an
    export `before_export` is called, and may raise. Raises ConfigError when `path` is a model folder of another weight
    format, or the export's folder holds another model; ManifestError and ExportError for damaged input.
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
    source = path if path.name not in ("", "..") else path.resolve()
    out = source.with_name(f"{source.stem if source.is_file() else source.name}-{weight_format}")
    if not _is_export(out, source):
        if before_export is not None:
            before_export()
        from graphs.export import export_model  # noqa: PLC0415 slow to import, and seldom needed

        export_model(
            path,
            out,
            weight_format,
            overwrite=True,
            progress=ProgressBar(),
            available_memory_bytes=available_memory_bytes(),
        )
    return out


def _is_export(folder: Path, source: Path) -> bool:
    """Whether `folder` is an export of `source` as it is now. Raises ConfigError when it is one of something else."""
    try:
        made_of = Manifest.load(folder).source
    except ManifestError:  # missing, damaged or of an older format
        return False
    if "fingerprint" not in made_of:  # of an older release
        return False
    name = source_name(source)
    if made_of.get("name") != name:
        limit = f"export {name} to another folder with `chairlift export`, and name that"
        raise ConfigError(f"{folder}: was exported from {made_of.get('name')}, not from {name}: {limit}")
    return made_of.get("fingerprint") == source_fingerprint(source)
