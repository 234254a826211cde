"""The file that results are written to."""

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def open_results(path: Path) -> TextIO:
    """Create the file of results. Half a surrogate pair, which JSON can hold and UTF-8 cannot, is written escaped.

    Where stdout goes already, results are written behind what is there.
    """
    file = io.BufferedWriter(_NamedFile(path))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="\n")


class _NamedFile(io.FileIO):
    """A file that errors of writing name, as those of opening do. The last may come when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(os.dup(sys.stdout.fileno()) if _is_stdout(path) else path, "w")
        self._path = path

    def write(self, content: "ReadableBuffer", /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error


def _is_stdout(path: Path) -> bool:
    """Whether stdout goes to this file, or is it by another name, as /dev/stdout."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # there is no such file, or no stdout
        return False
