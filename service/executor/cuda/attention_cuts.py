"""Where an attention plan cuts what is too long for one block, in tiles that lie end to end in a row."""

from typing import Final, NamedTuple

import numpy as np

from service.core.types import BoolArray, Int32Array, Int64Array

CHUNK_TOKENS: Final = 512  # deterministic: the shortest piece of a sequence
MAX_CHUNKS: Final = 16  # deterministic: pieces of a sequence
_SLACK: Final = 1.1  # of the even share, that uncut items may take
_CUT_TILES: Final = 8  # what cutting costs, about: writing partial results, reading and merging them
_MIN_PIECE_TILES: Final = 4  # of what is cut to share it out


class Pieces(NamedTuple):
    """What a row of things is cut into, in its order."""

    begin: Int64Array  # in the row
    thing: Int64Array  # which it is a piece of
    first: Int64Array  # its tiles in the thing, and their end
    end: Int64Array
    is_partial: BoolArray  # whether it is not all of the thing


def cut(tiles: Int32Array | Int64Array, cuts: Int64Array) -> Pieces:
    """Cut things of `tiles` each at their own ends and at `cuts`, which begin with 0."""
    ends: Int64Array = np.cumsum(tiles, dtype=np.int64)
    borders = np.union1d(ends, cuts[cuts < ends[-1]])
    begin, end = borders[:-1], borders[1:]
    thing = np.searchsorted(ends, begin, side="right")
    start = (ends - tiles)[thing]
    return Pieces(begin, thing, begin - start, end - start, (begin > start) | (end < ends[thing]))


def even_cuts(num_tiles: int, num_ranges: int) -> Int64Array:
    """Where `num_ranges` equal ranges of a row begin that are as short as possible, and where the last one ends."""
    return np.arange(num_ranges + 1) * max(1, -(-num_tiles // num_ranges))


def chunk_cuts(first_kv: Int32Array, contexts: Int32Array, tile_tokens: int) -> Int64Array:
    """Cuts at multiples of a sequence's own chunk, doubled until at most MAX_CHUNKS are left, and 0.

    `first_kv` is where each sequence's first tile begins.
    """
    tiles = -(-(contexts - first_kv) // tile_tokens)
    start = np.cumsum(tiles, dtype=np.int64) - tiles
    chunk = np.full(len(contexts), CHUNK_TOKENS, np.int64)
    first_chunk = first_kv // chunk
    while ((num_chunks := -(-contexts // chunk) - first_chunk) > MAX_CHUNKS).any():
        chunk[num_chunks > MAX_CHUNKS] *= 2
        first_chunk = first_kv // chunk
    num_cuts = np.maximum(num_chunks - 1, 0)
    last = np.cumsum(num_cuts)
    place = np.arange(last[-1]) - np.repeat(last - num_cuts - first_chunk, num_cuts) + 1
    position = place * np.repeat(chunk, num_cuts)
    cuts = np.repeat(start, num_cuts) + (position - np.repeat(first_kv, num_cuts)) // tile_tokens
    return np.append(cuts, 0)


def share_out(tiles: Int32Array, num_blocks: int) -> tuple[int, Int64Array]:
    """How many items stay whole, and where to cut the row of the others. `tiles` of each, longest first.

    As many blocks as the device holds take an item each, then, roughly, the next ones. Of the first such wave at whose
    end an even share of the work would long have been done, and of those behind it, nothing need stay whole: they are
    cut for all blocks to work to the end. Waves before it read K and V together, and stay as they are.
    """
    if not num_blocks:
        return len(tiles), even_cuts(0, 1)
    share = int(tiles.sum()) / num_blocks
    longest = tiles[::num_blocks]  # of each wave
    is_late = longest * np.arange(1, len(longest) + 1) > _SLACK * share + _CUT_TILES
    num_whole = int(is_late.argmax()) * num_blocks if is_late.any() else len(tiles)
    num_left = int(tiles[num_whole:].sum())
    return num_whole, even_cuts(num_left, min(num_blocks, max(1, num_left // _MIN_PIECE_TILES)))
