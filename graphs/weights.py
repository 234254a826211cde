"""Open a model's weights, whatever they are stored in. Tensor names and shapes are described in `graphs.tensors`."""

import re
from collections.abc import Callable
from pathlib import Path

from graphs.errors import ExportError
from graphs.gguf_source import GgufSource
from graphs.hf_source import HfSource
from graphs.tensors import BLOCK_SIZE, BlockWeights, TensorSource, tensor_shapes

__all__ = ["BLOCK_SIZE", "BlockWeights", "TensorSource", "download_from_hub", "open_source", "tensor_shapes"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def download_from_hub(hub_id: str) -> Path:
    """Fetch a model's files from the hub, or find them in its cache; yield their folder. Raises ExportError."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ExportError(f"{hub_id}: no such file or folder, and huggingface_hub is not installed") from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, RuntimeError) as error:  # its own errors derive from these
        reason = str(error).strip().splitlines()[:1]
        raise ExportError(f"{hub_id}: no such file or folder, and the hub did not yield it: {reason}") from error


def open_source(source: str | Path, *, download: Callable[[str], Path] = download_from_hub) -> TensorSource:
    """Open a GGUF file, a Hugging Face folder, or a hub id such as "owner/name".

    A path that exists is never taken for a hub id. Every tensor's presence and shape is checked here; values are
    read later. Raises ExportError.
    """
    path = Path(source)
    if path.is_dir():
        return HfSource(path)
    if path.is_file():
        return GgufSource(path)
    # "models/x" in a folder that holds "models" is a path with a slip in it, not somebody's model.
    if _HUB_ID.fullmatch(str(source)) and path.suffix != ".gguf" and not path.parent.exists():
        return HfSource(download(str(source)), path.name)
    raise ExportError(f"{source}: no such file or folder")
