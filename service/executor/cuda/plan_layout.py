"""How much an attention plan may hold, and where it lies: see attention_plan."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from service.core.types import Int32Array
from service.executor.cuda.attention_cuts import CHUNK_TOKENS, MAX_CHUNKS

DECODE_ROWS: Final = 16  # packed rows of a decode item
ITEM_FIELDS: Final = 8
WHOLE: Final = -1  # the slot of an item that is its rows' whole range
MERGE_FIELDS: Final = 8

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
    resident_prefill_blocks: int = 0  # of attn_prefill per kv head, that the device holds at once; 0: nothing is cut
    # Cut sequences by their own length alone, so that a result never depends on the rest of the batch.
    is_deterministic: bool = False

    @property
    def max_slots(self) -> int:
        """Slots for partial results of 16 rows: of decode items, and of prefill items."""
        cut_blocks = self.resident_prefill_blocks if self.cuts_prefill else 0
        return self.max_partials + 2 * cut_blocks * self.prefill_rows // DECODE_ROWS

    @property
    def max_partials(self) -> int:
        """Decode items with a slot."""
        if not self.is_deterministic:
            return 2 * self.num_ranges
        return self.max_seqs * min(MAX_CHUNKS, -(-self.max_context // CHUNK_TOKENS))

    @property
    def max_decode_merges(self) -> int:
        """Sequences in parts: each holds the beginning of a range that is not the first."""
        return self.max_seqs if self.is_deterministic else min(self.max_seqs, self.num_ranges - 1)

    @property
    def max_merges(self) -> int:
        """Merges of the largest plan."""
        num_cut = max(0, self.resident_prefill_blocks - 1) if self.cuts_prefill else 0
        return self.max_decode_merges + num_cut * self.prefill_rows // DECODE_ROWS

    @property
    def cuts_prefill(self) -> bool:
        """Whether prefill items are ever cut."""
        return self.resident_prefill_blocks > 0 and not self.is_deterministic

    @property
    def max_decode_items(self) -> int:
        """Decode items of the largest plan."""
        return self.max_seqs + (self.max_partials if self.is_deterministic else self.num_ranges)

    @property
    def max_prefill_items(self) -> int:
        """Prefill items of the largest plan: full ones, a last one for each sequence, and what cuts add."""
        num_whole = self.max_tokens * self.group_size // self.prefill_rows + min(self.max_seqs, self.max_tokens)
        return num_whole + (self.resident_prefill_blocks if self.cuts_prefill else 0)


class PlanSections(NamedTuple):
    """The arrays of a plan: views of one int32 buffer, or their offsets in it."""

    range_begin: Int32Array  # [num_ranges + 1] the first decode item of each block, then their number
    num_merges: Int32Array  # [1]
    # [max_merges, 8]: first slot, number of slots, from one to the next, first packed row, number of rows (at most 16),
    # first token of the sequence in the step, 0, 0
    merges: Int32Array
    decode_items: Int32Array  # [max_decode_items, 8]
    num_prefill_items: Int32Array  # [1]
    # [max_prefill_items, 8] as above: sequence, first packed row, tokens of the sequence in this step, first and end
    # position of K and V, slot or WHOLE, first token in the step, tokens of the sequence after the step
    prefill_items: Int32Array


class PlanCounts(NamedTuple):
    """How much of a plan's arrays is in use."""

    num_decode_items: int
    num_prefill_items: int
    num_slots: int  # at most PlanLimits.max_slots, which the workspace holds
    num_merges: int


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
            (1,),
            (limits.max_merges if has_prefill else limits.max_decode_merges, MERGE_FIELDS),
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
