"""How to take changes back, exactly."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Undo = Callable[[], object]


class UndoLog:
    """While open, keeps what it takes to undo each change, in order. Closed, it keeps nothing."""

    def __init__(self) -> None:
        self._is_open = False
        self._undos: list[Undo] = []

    def open(self) -> None:
        """Keep undos from now on."""
        assert not self._is_open, "changes are being logged already"
        self._is_open = True

    def close(self) -> None:
        """Forget them all: the changes stay."""
        self._is_open = False
        self._undos.clear()

    def undo(self) -> None:
        """Take all changes back, the last one first, and close."""
        undos = self._undos[::-1]
        self.close()
        for undo in undos:
            undo()

    def save(self, array: npt.NDArray[np.generic], places: npt.NDArray[np.integer] | slice) -> None:
        """Keep `array[places]`, which is about to change."""
        if self._is_open:
            old = array[places].copy()
            self._undos.append(lambda: array.__setitem__(places, old))

    def add(self, undo: Undo) -> None:
        """Keep an undo of another kind."""
        if self._is_open:
            self._undos.append(undo)
