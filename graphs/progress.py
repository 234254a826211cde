"""How far a long job is: a callback, and a bar for terminals."""

import sys
from collections.abc import Callable
from typing import TextIO

# Called with what is being done, how many parts of it are done, and how many there are.
Progress = Callable[[str, int, int], None]

_BAR_WIDTH = 30


def silent(stage: str, num_done: int, num_parts: int) -> None:
    """A Progress that shows nothing."""
    del stage, num_done, num_parts


class ProgressBar:
    """A Progress on one line of a terminal, a line per stage; nothing where `stream` is no terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to `stream`, standard error by default."""
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()

    def __call__(self, stage: str, num_done: int, num_parts: int) -> None:
        """Redraw the line; end it when all parts are done."""
        if not self._is_terminal:
            return
        filled = _BAR_WIDTH * num_done // max(num_parts, 1)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        end = "\n" if num_done >= num_parts else ""
        self._stream.write(f"\r{stage:<24} [{bar}] {num_done}/{num_parts}{end}")
        self._stream.flush()
