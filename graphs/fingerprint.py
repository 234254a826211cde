"""What tells whether a model's source has changed since it was exported."""

import hashlib
from pathlib import Path
from typing import Final

_FOLDER_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)


def source_name(path: Path) -> str:
    """What a file or folder is called, also the working folder."""
    return path.resolve().name if path.name in ("", "..") else path.name


def source_fingerprint(path: Path) -> str:
    """SHA-256, in hex, over name, size and modification time of the file, or of what an export reads of the folder.

    Raises OSError when one cannot be looked at.
    """
    files = [path] if path.is_file() else sorted({file for kind in _FOLDER_FILES for file in path.glob(kind)})
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
