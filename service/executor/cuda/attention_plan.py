"""Which part of the attention each block of the CUDA kernels computes, planned once a step for all layers.

Vocabulary. A *packed row* is one (token, query head of a kv head's group) pair; the rows of a sequence are numbered
token * group_size + head in the group. A *tile* is a fixed number of token positions of K and V. An *item* is what a
block computes at a time: up to 16 (decode) or `prefill_rows` packed rows of one sequence over one range of tiles.

Sequences with at most 16 packed rows are decoded. Their tiles, laid end to end, are cut into as many equal ranges as
there are blocks, and also where one sequence ends and the next begins. A piece that is not its sequence's whole range
is a *partial* item: its result goes into a numbered slot, and a second kernel merges the slots of each sequence in
order. A block's range begins and ends inside at most two sequences, so it has at most two partial items.

All other sequences are prefilled: an item per `prefill_rows` packed rows over all the tiles that they see, longest
first. Where that leaves blocks idle, as a few tokens behind a long cached prefix do, or a few items more than the
device holds at once, the last ones are cut over their tiles: their pieces leave partial results too, in as many slots
as they have 16 rows (`attention_cuts.share_out`). Deterministic plans never cut them: their results do not even depend
on how a prompt is cut into chunks, which others have a say in.

A plan is data at fixed addresses, so that the launches of a captured CUDA graph never change.
"""

from typing import Final

import numpy as np

from service.core.types import Int32Array, Int64Array
from service.executor.cuda.attention_cuts import Pieces, chunk_cuts, cut, even_cuts, share_out
from service.executor.cuda.plan_layout import (
    DECODE_ROWS,
    ITEM_FIELDS,
    WHOLE,
    PlanCounts,
    PlanLayout,
    PlanLimits,
)

_CUT_TOKENS: Final = 64  # prefill items are cut at multiples: of whichever tile their kernel has


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
        counts = self._fill_decode(cu_seqlens, query_lens, decode_contexts)
        if not is_short.all():
            counts = self._fill_prefill(cu_seqlens, query_lens, context_lens, np.flatnonzero(~is_short), counts)
        # The kernels would write beyond the workspace.
        assert counts.num_slots <= self._limits.max_slots, "a step beyond the limits that its plan was made for"
        self.sections.num_prefill_items[0] = counts.num_prefill_items
        self.sections.num_merges[0] = counts.num_merges
        return counts

    def _fill_decode(self, cu_seqlens: Int32Array, query_lens: Int32Array, contexts: Int32Array) -> PlanCounts:
        limits, sections, tile_tokens = self._limits, self.sections, self._limits.tile_tokens
        first_kv = self._first_kv(contexts - query_lens)
        tiles = -(-(contexts - first_kv) // tile_tokens)
        edges = even_cuts(int(tiles.sum()), limits.num_ranges)
        pieces = cut(tiles, chunk_cuts(first_kv, contexts, tile_tokens) if limits.is_deterministic else edges)
        seq, is_partial = pieces.thing, pieces.is_partial
        kv_begin = first_kv[seq] + pieces.first * tile_tokens
        kv_end = np.minimum(first_kv[seq] + pieces.end * tile_tokens, contexts[seq])
        slots = np.where(is_partial, np.cumsum(is_partial) - 1, WHOLE)
        items = sections.decode_items[: len(seq)]
        _set_rows(items, (seq, 0, query_lens[seq], kv_begin, kv_end, slots, cu_seqlens[seq], contexts[seq]))
        sections.range_begin[:] = np.searchsorted(pieces.begin, edges)
        num_parts = np.bincount(seq[is_partial], minlength=len(contexts))
        is_cut = np.flatnonzero(num_parts)
        num_parts = num_parts[is_cut]
        first_slot = np.cumsum(num_parts) - num_parts
        num_rows = query_lens[is_cut] * limits.group_size
        merges = sections.merges[: len(is_cut)]
        _set_rows(merges, (first_slot, num_parts, 1, 0, num_rows, cu_seqlens[is_cut], 0, 0))
        return PlanCounts(len(items), 0, int(num_parts.sum()), len(merges))

    def _fill_prefill(
        self,
        cu_seqlens: Int32Array,
        query_lens: Int32Array,
        contexts: Int32Array,
        seqs: Int64Array,
        counts: PlanCounts,
    ) -> PlanCounts:
        """An item for each `prefill_rows` packed rows of `seqs`, or pieces of it. `counts`: of the decode items."""
        limits, item_rows = self._limits, self._limits.prefill_rows
        seq, first_row, num_rows = _rows_of_items(query_lens[seqs] * limits.group_size, item_rows, seqs)
        num_before = contexts[seq] - query_lens[seq]
        kv_begin = self._first_kv(num_before + first_row // limits.group_size)
        kv_end = num_before + (first_row + num_rows - 1) // limits.group_size + 1
        fields = (seq, first_row, query_lens[seq], kv_begin, kv_end, WHOLE, cu_seqlens[seq], contexts[seq])
        whole = np.empty((len(seq), ITEM_FIELDS), np.int32)
        _set_rows(whole, fields)
        order = np.argsort(kv_begin - kv_end, kind="stable")
        tiles = -(-(kv_end - kv_begin)[order] // _CUT_TOKENS)
        num_whole, cuts = share_out(tiles, limits.resident_prefill_blocks if limits.cuts_prefill else 0)
        if num_whole == len(seq):
            self.sections.prefill_items[: len(seq)] = whole[order]
            return counts._replace(num_prefill_items=len(seq))
        pieces = cut(tiles[num_whole:], cuts)
        parts = whole[order[num_whole:]][pieces.thing]
        rows_left = num_rows[order[num_whole:]][pieces.thing]
        slots, counts = self._merge_pieces(pieces, parts, rows_left, counts)
        kv_begin, kv_end = parts[:, 3].copy(), parts[:, 4].copy()
        parts[:, 3] = kv_begin + pieces.first * _CUT_TOKENS
        parts[:, 4] = np.minimum(kv_begin + pieces.end * _CUT_TOKENS, kv_end)
        parts[:, 5] = slots
        all_items = np.concatenate([whole[order[:num_whole]], parts])
        longest_first = np.argsort(all_items[:, 3] - all_items[:, 4], kind="stable")
        self.sections.prefill_items[: len(all_items)] = all_items[longest_first]
        return counts._replace(num_prefill_items=len(all_items))

    def _merge_pieces(
        self, pieces: Pieces, items: Int32Array, num_rows: Int64Array, counts: PlanCounts
    ) -> tuple[Int64Array, PlanCounts]:
        """The slot of each piece, and how its item is merged. `items` and `num_rows` are those of the piece's item."""
        width = -(-num_rows // DECODE_ROWS)  # slots of a piece
        taken = np.where(pieces.is_partial, width, 0)
        slots = np.where(pieces.is_partial, counts.num_slots + np.cumsum(taken) - taken, WHOLE)
        num_parts = np.bincount(pieces.thing, minlength=1)[pieces.thing]
        firsts = np.flatnonzero(pieces.is_partial & (pieces.first == 0))
        widths = width[firsts]
        piece = np.repeat(firsts, widths)
        place = np.arange(len(piece)) - np.repeat(np.cumsum(widths) - widths, widths)
        row = place * DECODE_ROWS
        rows = (items[piece, 1] + row, np.minimum(num_rows[piece] - row, DECODE_ROWS), items[piece, 6])
        merges = self.sections.merges[counts.num_merges : counts.num_merges + len(piece)]
        _set_rows(merges, (slots[piece] + place, num_parts[piece], width[piece], *rows, 0, 0))
        num_slots = counts.num_slots + int(taken.sum())
        return slots, counts._replace(num_slots=num_slots, num_merges=counts.num_merges + len(piece))

    def _first_kv(self, positions: Int32Array) -> Int32Array:
        """Where the tile begins that holds the first token which a token at each of `positions` sees."""
        window, tile_tokens = self._limits.sliding_window, self._limits.tile_tokens
        if not window:
            return np.zeros_like(positions)
        first: Int32Array = np.maximum(positions - (window - 1), 0) // tile_tokens * tile_tokens
        return first


def _rows_of_items(num_rows: Int32Array, item_rows: int, seqs: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The sequence, first packed row and number of rows of each item of `seqs`, which have `num_rows` each."""
    num_items = -(-num_rows // item_rows)
    seq = np.repeat(seqs, num_items)
    last = np.cumsum(num_items)
    first_row = (np.arange(last[-1]) - np.repeat(last - num_items, num_items)) * item_rows
    return seq, first_row, np.minimum(np.repeat(num_rows, num_items) - first_row, item_rows)


def _set_rows(rows: Int32Array, columns: tuple[Int64Array | Int32Array | int, ...]) -> None:
    for column, values in enumerate(columns):
        rows[:, column] = values
