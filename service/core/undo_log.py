"""How to take changes back, exactly."""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Undo = Callable[[], object]


class UndoLog:
    """While a part of it is open, keeps what it takes to undo each change, in order. Else it keeps nothing.

    There may be two parts, when the plan of a step is made while the step before is in flight. Changes go to the later
    one; the earlier one is closed first, or the later one undone.
    """

    def __init__(self) -> None:
        self._parts: deque[list[Undo]] = deque()

    @property
    def is_open(self) -> bool:
        """True while changes can be taken back."""
        return bool(self._parts)

    def open(self) -> None:
        """Begin a part: keep undos in it from now on."""
        self._parts.append([])

    def close(self) -> None:
        """Forget the earliest part: its changes stay."""
        self._parts.popleft()

    def undo(self) -> None:
        """Take the changes of the latest part back, the last one first, and close it."""
        for undo in reversed(self._parts.pop()):
            undo()

    def save(self, array: npt.NDArray[np.generic], places: npt.NDArray[np.integer] | slice) -> None:
        """Keep `array[places]`, which is about to change."""
        if self._parts:
            old = array[places].copy()
            self._parts[-1].append(lambda: array.__setitem__(places, old))

    def add(self, undo: Undo) -> None:
        """Keep an undo of another kind."""
        if self._parts:
            self._parts[-1].append(undo)
