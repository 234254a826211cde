"""Which part of the attention each block of the CUDA kernels computes, planned once a step for all layers.

Vocabulary. A *packed row* is one (token, query head of a kv head's group) pair; the rows of a sequence are numbered
token * group_size + head in the group. A *tile* is a fixed number of token positions of K and V. An *item* is what a
block computes at a time: up to 16 (decode) or `prefill_rows` packed rows of one sequence over one range of tiles.

Sequences with at most 16 packed rows are decoded. Their tiles, laid end to end, are cut into as many equal ranges as
there are blocks, and also where one sequence ends and the next begins. A piece that is not its sequence's whole range
is a *partial* item: its result goes into a numbered slot, and a second kernel merges the slots of each sequence in
order. A block's range begins and ends inside at most two sequences, so it has at most two partial items.

All other sequences are prefilled: an item per `prefill_rows` packed rows over all the tiles that they see, longest
first.

A plan is data at fixed addresses, so that the launches of a captured CUDA graph never change.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from service.core.types import BoolArray, Int32Array, Int64Array

DECODE_ROWS: Final = 16  # packed rows of a decode item
ITEM_FIELDS: Final = 8
WHOLE: Final = -1  # the slot of an item that is its sequence's whole range
CHUNK_TOKENS: Final = 512  # deterministic: the shortest piece of a sequence
MAX_CHUNKS: Final = 16  # deterministic: pieces of a sequence

_ALIGNMENT: Final = 8  # in int32: sections begin at 32 bytes, an item's size


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What the largest plan is made for."""

    num_ranges: int  # blocks of the persistent decode grid per kv head
    group_size: int  # query heads per kv head
    max_seqs: int
    max_tokens: int  # of one step
    max_context: int  # tokens of one sequence
    tile_tokens: int = 64  # what the kernels were compiled for
    prefill_rows: int = 64  # as well: packed rows of a prefill item
    sliding_window: int = 0  # tokens that a token sees, itself included; 0: all before it
    # Cut sequences by their own length alone, so that a result never depends on the rest of the batch.
    is_deterministic: bool = False

    @property
    def max_partials(self) -> int:
        """Slots for partial results."""
        if not self.is_deterministic:
            return 2 * self.num_ranges
        return self.max_seqs * min(MAX_CHUNKS, -(-self.max_context // CHUNK_TOKENS))

    @property
    def max_decode_items(self) -> int:
        """Decode items of the largest plan."""
        return self.max_seqs + (self.max_partials if self.is_deterministic else self.num_ranges)

    @property
    def max_prefill_items(self) -> int:
        """Prefill items of the largest plan: full ones, and a last one for each sequence."""
        return self.max_tokens * self.group_size // self.prefill_rows + min(self.max_seqs, self.max_tokens)


class PlanSections(NamedTuple):
    """The arrays of a plan: views of one int32 buffer, or their offsets in it."""

    range_begin: Int32Array  # [num_ranges + 1] the first decode item of each block, then their number
    part_begin: Int32Array  # [max_seqs + 1] the first slot of each sequence, then their number
    decode_items: Int32Array  # [max_decode_items, 8]
    num_prefill_items: Int32Array  # [1]
    # [max_prefill_items, 8] as above: sequence, first packed row, tokens of the sequence in this step, first and end
    # position of K and V, slot or WHOLE, first token in the step, tokens of the sequence after the step
    prefill_items: Int32Array


class PlanCounts(NamedTuple):
    """How much of a plan's arrays is in use."""

    num_decode_items: int
    num_partials: int  # at most PlanLimits.max_partials, which the workspace holds
    num_prefill_items: int


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the sections lie in the buffer, in int32 elements."""

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, limits: PlanLimits, *, has_prefill: bool) -> "PlanLayout":
        """The layout of plans within `limits`; without prefill there is room for decode items only."""
        shapes: tuple[tuple[int, ...], ...] = (
            (limits.num_ranges + 1,),
            (limits.max_seqs + 1,),
            (limits.max_decode_items, ITEM_FIELDS),
            (1,),
            (limits.max_prefill_items if has_prefill else 0, ITEM_FIELDS),
        )
        offsets, size = [], 0
        for shape in shapes:
            offsets.append(size)
            size += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        return cls(shapes, tuple(offsets), size)

    def sections(self, buffer: Int32Array) -> PlanSections:
        """The views of `buffer` int32[size]."""
        views = []
        for shape, offset in zip(self.shapes, self.offsets, strict=True):
            views.append(buffer[offset : offset + int(np.prod(shape))].reshape(shape))
        return PlanSections(*views)


class AttentionPlanner:
    """Fills plans into one buffer, which each overwrites. Owned by the engine thread."""

    def __init__(self, limits: PlanLimits, layout: PlanLayout, buffer: Int32Array) -> None:
        """Plan into `buffer` int32[layout.size]."""
        self._limits = limits
        self._layout = layout
        self.sections = layout.sections(buffer)

    def fill(self, cu_seqlens: Int32Array, context_lens: Int32Array) -> PlanCounts:
        """Plan a step of `len(context_lens)` sequences, int32[num_seqs + 1] and int32[num_seqs].

        A sequence without tokens, or with a context of 0, gets no item: it is padding.
        """
        query_lens = np.diff(cu_seqlens)
        is_short = query_lens * self._limits.group_size <= DECODE_ROWS
        decode_contexts = np.where(is_short & (query_lens > 0), context_lens, 0)
        num_items, num_partials = self._fill_decode(cu_seqlens, query_lens, decode_contexts)
        # The kernels would write beyond the workspace.
        assert num_partials <= self._limits.max_partials, "a step beyond the limits that its plan was made for"
        num_prefill = 0
        if not is_short.all():
            num_prefill = self._fill_prefill(cu_seqlens, query_lens, context_lens, np.flatnonzero(~is_short))
        self.sections.num_prefill_items[0] = num_prefill
        return PlanCounts(num_items, num_partials, num_prefill)

    def _fill_decode(self, cu_seqlens: Int32Array, query_lens: Int32Array, contexts: Int32Array) -> tuple[int, int]:
        limits, sections, tile_tokens = self._limits, self.sections, self._limits.tile_tokens
        first_kv = self._first_kv(contexts - query_lens)
        tiles = -(-(contexts - first_kv) // tile_tokens)
        end: Int64Array = np.cumsum(tiles, dtype=np.int64)  # of each sequence's tiles in the row of all
        start = end - tiles
        num_tiles = int(end[-1])
        per_range = max(1, -(-num_tiles // limits.num_ranges))
        edges = np.arange(limits.num_ranges + 1) * per_range
        cuts = _chunk_cuts(start, first_kv, contexts, tile_tokens) if limits.is_deterministic else edges
        cuts = np.union1d(end, cuts[cuts < num_tiles])
        begin, stop = cuts[:-1], cuts[1:]
        seq = np.searchsorted(end, begin, side="right")
        origin, context = first_kv[seq], contexts[seq]
        kv_begin = origin + (begin - start[seq]) * tile_tokens
        kv_end = np.minimum(origin + (stop - start[seq]) * tile_tokens, context)
        is_partial: BoolArray = (kv_begin > origin) | (kv_end < context)
        slots = np.where(is_partial, np.cumsum(is_partial) - 1, WHOLE)
        items = sections.decode_items[: len(seq)]
        _set_items(items, (seq, 0, query_lens[seq], kv_begin, kv_end, slots, cu_seqlens[seq], context))
        sections.range_begin[:] = np.searchsorted(begin, edges)
        part_begin = sections.part_begin[: len(contexts) + 1]
        part_begin[0] = 0
        np.cumsum(np.bincount(seq[is_partial], minlength=len(contexts)), out=part_begin[1:])
        return len(items), int(part_begin[-1])

    def _fill_prefill(
        self, cu_seqlens: Int32Array, query_lens: Int32Array, contexts: Int32Array, seqs: Int64Array
    ) -> int:
        """An item for each `prefill_rows` packed rows of `seqs`."""
        group_size, item_rows = self._limits.group_size, self._limits.prefill_rows
        num_rows = query_lens[seqs] * group_size
        num_items = -(-num_rows // item_rows)
        seq = np.repeat(seqs, num_items)
        last = np.cumsum(num_items)
        first_row = (np.arange(last[-1]) - np.repeat(last - num_items, num_items)) * item_rows
        last_row = np.minimum(first_row + item_rows, np.repeat(num_rows, num_items)) - 1
        num_before = contexts[seq] - query_lens[seq]
        kv_begin = self._first_kv(num_before + first_row // group_size)
        kv_end = num_before + last_row // group_size + 1
        longest_first = np.argsort(kv_begin - kv_end, kind="stable")
        fields = (seq, first_row, query_lens[seq], kv_begin, kv_end, WHOLE, cu_seqlens[seq], contexts[seq])
        items = self.sections.prefill_items[: len(seq)]
        _set_items(items, fields)
        items[:] = items[longest_first]
        return len(items)

    def _first_kv(self, positions: Int32Array) -> Int32Array:
        """Where the tile begins that holds the first token which a token at each of `positions` sees."""
        window, tile_tokens = self._limits.sliding_window, self._limits.tile_tokens
        if not window:
            return np.zeros_like(positions)
        first: Int32Array = np.maximum(positions - (window - 1), 0) // tile_tokens * tile_tokens
        return first


def _chunk_cuts(start: Int64Array, first_kv: Int32Array, contexts: Int32Array, tile_tokens: int) -> Int64Array:
    """Cuts at multiples of a sequence's own chunk, doubled until at most MAX_CHUNKS are left, in tiles of the row.

    `start` is each sequence's first tile there, `first_kv` the position where it begins.
    """
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


def _set_items(items: Int32Array, fields: tuple[Int64Array | Int32Array | int, ...]) -> None:
    for column, values in enumerate(fields):
        items[:, column] = values
