"""What tells whether a model's source has changed since it was exported."""

import hashlib
from pathlib import Path


def source_fingerprint(path: Path) -> str:
    """SHA-256, in hex, over name, size and modification time of the file, or of all files right in the folder.

    Raises OSError when one cannot be looked at.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
