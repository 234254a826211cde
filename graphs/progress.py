"""How far a long job is: a callback, and a bar for terminals."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

# Called with what is being done, how many parts of it are done, and how many there are.
Progress = Callable[[str, int, int], None]

_BAR_WIDTH = 30
_QUIET_S = 10.0  # between the lines where there is no terminal


class OpenProgress(Protocol):
    """What tells of a stage that is not over."""

    def __call__(self, num_done: int, note: str = "") -> None:
        """Show that `num_done` parts are done, and `note` behind the stage's name."""


def silent(stage: str, num_done: int, num_parts: int) -> None:
    """A Progress that shows nothing."""
    del stage, num_done, num_parts


class ProgressBar:
    """A Progress on one line of a terminal, a line per stage; elsewhere lines that say how far a long job is."""

    def __init__(self, stream: TextIO | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        """Write to `stream`, standard error by default."""
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._now_s = now_s
        self._quiet_until_s = now_s() + _QUIET_S

    def __call__(self, stage: str, num_done: int, num_parts: int) -> None:
        """Redraw the line, and end it when all parts are done; where there is no terminal, write one now and then."""
        filled = _BAR_WIDTH * num_done // max(num_parts, 1)
        text = f"{stage:<24} [{'#' * filled + '.' * (_BAR_WIDTH - filled)}] {num_done}/{num_parts}"
        if self._is_terminal:
            # What was there may be longer: a note, say.
            self._stream.write(f"\r\033[K{text}" + ("\n" if num_done >= num_parts else ""))
        elif self._now_s() < self._quiet_until_s:
            return
        else:
            self._quiet_until_s = self._now_s() + _QUIET_S
            self._stream.write(f"{text}\n")
        self._stream.flush()

    @contextmanager
    def open(self, stage: str, num_parts: int) -> Iterator[OpenProgress]:
        """A stage that is complete when the `with` ends well, and not before, though all parts may be done by then."""

        def show(num_done: int, note: str = "") -> None:
            self(f"{stage}{note}", min(num_done, num_parts - 1), num_parts)

        yield show
        self(stage, num_parts, num_parts)
