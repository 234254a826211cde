"""How much time copies to host memory may take."""

from typing import Final

from service.core.undo_log import UndoLog

_FREE_SHARE: Final = 1 / 16  # of the copies, that are made whether anything is asked for again or not
_PIECE: Final = 1 / 16  # of host memory, for whose copies time is saved up before any is spent again


class CopyBudget:
    """Time for copies out, which copies in pay for: so they cost little where nothing is asked for again.

    It begins with what filling host memory once takes, and never has more. A copy in adds the time that it saved, and
    each block that could be copied a sixteenth of a copy. When nothing is left, nothing is copied until there is enough
    for many: chains are kept whole or not at all, but for a few. Owned by the HostTier.
    """

    def __init__(self, num_host_blocks: int, block_copy_ns: float, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self._block_copy_ns = block_copy_ns
        self._most_ns = num_host_blocks * block_copy_ns
        self._left_ns = self._most_ns
        self._is_saving = False
        self._log = log

    @property
    def state(self) -> tuple[float, bool]:
        """Nanoseconds left, and whether they are being saved up. For snapshots."""
        return self._left_ns, self._is_saving

    def earn(self, saved_ns: float) -> None:
        """A copy in saved so much time."""
        self._set(min(self._left_ns + saved_ns, self._most_ns), self._is_saving)

    def spend(self, num_blocks: int) -> bool:
        """Whether `num_blocks` that could be copied out are. Then the time for it is spent."""
        copy_ns = num_blocks * self._block_copy_ns
        self.earn(_FREE_SHARE * copy_ns)
        least_ns = max(copy_ns, _PIECE * self._most_ns) if self._is_saving else copy_ns
        is_enough = self._left_ns >= least_ns
        self._set(self._left_ns - copy_ns if is_enough else self._left_ns, not is_enough)
        return is_enough

    def _set(self, left_ns: float, is_saving: bool) -> None:
        old = self._left_ns, self._is_saving
        self._log.add(lambda: self._restore(old))
        self._left_ns, self._is_saving = left_ns, is_saving

    def _restore(self, state: tuple[float, bool]) -> None:
        self._left_ns, self._is_saving = state
