"""Which full block holds the keys and values of which prefix."""

from collections.abc import Iterable, Sequence

import numpy as np

from service.core.types import NULL_BLOCK, BoolArray, Int32Array
from service.core.undo_log import UndoLog


class PrefixCache:
    """Digest -> block, for blocks that are full and computed. Part of the BlockPool, which says what is evicted.

    The cached blocks form a tree: a block's parent holds the tokens just before its own, and is cached too.
    """

    def __init__(self, num_blocks: int, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks]
        self.parents: Int32Array = np.full(num_blocks, NULL_BLOCK, np.int32)  # [num_blocks] null block: it has none
        self._digests: list[bytes] = [b""] * num_blocks  # of cached blocks
        self._blocks: dict[bytes, int] = {}
        self._log = log

    def __len__(self) -> int:
        """Cached blocks, referenced ones included."""
        return len(self._blocks)

    def match(self, digests: Iterable[bytes]) -> Int32Array:
        """The blocks of the longest cached prefix of a chain of digests: int32[num_matched]."""
        blocks: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32)

    def find(self, digest: bytes) -> int | None:
        """The block that is cached under `digest`."""
        return self._blocks.get(digest)

    def put(self, blocks: Sequence[int], digests: Sequence[bytes], parents: Sequence[int]) -> None:
        """Cache blocks under digests that are not cached yet; a parent comes before its children."""
        self._blocks.update(zip(digests, blocks, strict=True))
        for block, digest in zip(blocks, digests, strict=True):
            self._digests[block] = digest
        places = np.array(blocks, np.int32)
        self._log.save(self.parents, places)
        self.parents[places] = parents
        self.is_cached[places] = True
        self._log.add(lambda: self._remove(places))

    def forget(self, blocks: Int32Array) -> None:
        """Drop cached blocks, and with each all its children."""
        digests = self._remove(blocks)
        self._log.add(lambda: self.put(blocks.tolist(), digests, self.parents[blocks].tolist()))

    def entries(self) -> tuple[tuple[int, bytes, int], ...]:
        """(block, digest, parent) of every cached block, by block. Sorts: for snapshots, not for steps."""
        return tuple(
            (block, digest, int(self.parents[block]))
            for digest, block in sorted(self._blocks.items(), key=lambda item: item[1])
        )

    def _remove(self, blocks: Int32Array) -> list[bytes]:
        numbers = blocks.tolist()
        digests = [self._digests[block] for block in numbers]
        for block, digest in zip(numbers, digests, strict=True):
            del self._blocks[digest]
            self._digests[block] = b""
        self.is_cached[blocks] = False
        return digests
