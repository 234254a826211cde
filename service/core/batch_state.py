"""The running sequences as a struct of arrays: dense rows, decode rows first."""

import numpy as np

from service.core.types import (
    NULL_BLOCK,
    BoolArray,
    Float32Array,
    Int32Array,
    Int64Array,
    Request,
)

NO_TOKEN = -1
"""Fills the unused places of a row's stop token ids; no token has this id."""

NEVER_RESUMED = -(1 << 30)
"""`num_resumed_tokens` of a row that was never preempted; of others, the known tokens with which it came back."""

Rows = Int32Array | slice
"""Which rows: their numbers, or a slice of them, which numpy reads and writes several times faster."""


class BatchState:
    """Per-row columns of the running sequences. Rows 0..num_rows-1 are live and dense; owned by the engine thread.

    The scheduler writes; an executor reads the columns of the rows in its plan. Rows 0..num_decode_rows-1 have
    exactly one token left to compute, the rows after them catch up with a prompt. `arrange` keeps it so after each
    step: it moves only the rows that are in the wrong zone, into the seats of those that left it. A new row is
    appended at the end, whatever it has left, and takes its place at the first `arrange`.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks_per_seq = -(-max_model_len // block_size)
        self.max_model_len = max_model_len  # tokens that a row has room for
        self.num_rows = 0
        self.num_decode_rows = 0
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)  # prompt, then output
        self._row_numbers: Int32Array = np.arange(max_num_seqs, dtype=np.int32)
        self._row_numbers.flags.writeable = False  # plans hand out slices of it
        self._flat_token_ids: Int32Array = self.token_ids.reshape(-1)  # a view
        self._first_places: Int64Array = np.arange(max_num_seqs) * max_model_len  # of each row in flat token_ids
        self.block_table: Int32Array = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)  # then the null block
        # The other columns lie side by side, [num_columns, max_num_seqs], so that a row moves in a few copies.
        self._int32_columns: Int32Array = np.zeros((14, max_num_seqs), np.int32)
        self.num_prompt_tokens: Int32Array = self._int32_columns[0]
        self.num_tokens: Int32Array = self._int32_columns[1]  # known tokens: prompt and output so far
        self.num_computed_tokens: Int32Array = self._int32_columns[2]  # tokens whose K and V are in blocks
        self.num_blocks: Int32Array = self._int32_columns[3]  # valid entries of each block table row
        self.num_published_blocks: Int32Array = self._int32_columns[4]  # of them, in the prefix cache
        self.top_k: Int32Array = self._int32_columns[5]
        self.num_resumed_tokens: Int32Array = self._int32_columns[6]  # see `NEVER_RESUMED`
        self.num_resumed_tokens[:] = NEVER_RESUMED
        self.tenant_slot: Int32Array = self._int32_columns[7]  # Sequence.tenant_slot
        self.min_num_tokens: Int32Array = self._int32_columns[8]  # known tokens a stop token may follow
        self.max_num_tokens: Int32Array = self._int32_columns[9]  # known tokens that end it with LENGTH
        self._int64_columns: Int64Array = np.zeros((4, max_num_seqs), np.int64)
        self.seq_ids: Int64Array = self._int64_columns[0]
        self.seq_ids[:] = -1
        self.seed: Int64Array = self._int64_columns[1]  # the 64 bits of SamplingParams.seed
        self.rank: Int64Array = self._int64_columns[2]  # Sequence.rank
        self.admitted_step: Int64Array = self._int64_columns[3]  # whose plan gave the sequence its row
        self.num_admitted_tokens: Int32Array = self._int32_columns[13]  # that it had to compute then
        self.temperature: Float32Array = self._int32_columns[10].view(np.float32)
        self.top_p: Float32Array = self._int32_columns[11].view(np.float32)
        self.min_p: Float32Array = self._int32_columns[12].view(np.float32)
        self._bool_columns: BoolArray = np.zeros((2, max_num_seqs), np.bool_)
        self.has_ended: BoolArray = self._bool_columns[0]  # but keeps its row; see `EndedRows`
        self.has_failed: BoolArray = self._bool_columns[1]  # and has computed what is not to be trusted
        # [widest, max_num_seqs], a row's in a column, padded with NO_TOKEN; a new array when the widest comes or goes
        self.stop_token_ids: Int32Array = np.full((1, max_num_seqs), NO_TOKEN, np.int32)
        self.requests: list[Request | None] = [None] * max_num_seqs  # with all its parameters, for rare features

    @property
    def max_num_seqs(self) -> int:
        """Rows there are."""
        return len(self.seq_ids)

    def row_of(self, seq_id: int) -> int | None:
        """The row of a sequence, None when it has none. Searches all rows: for events, not for every step."""
        found = np.flatnonzero(self.seq_ids[: self.num_rows] == seq_id)
        return int(found[0]) if len(found) else None

    def blocks_of(self, rows: Int32Array) -> Int32Array:
        """The blocks of `rows`, one row's after the other's, each in token order. Returns a new int32[num_blocks]."""
        counts = self.num_blocks[rows].tolist()
        parts = [self.block_table[row, :count] for row, count in zip(rows.tolist(), counts, strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def add_row(self, request: Request, token_ids: Int32Array, rank: int = 0, tenant_slot: int = 0) -> int:
        """Append a row that has computed nothing and holds no block. Returns its number.

        `token_ids` are the known tokens, int32[num_tokens]: the prompt, and after a preemption the output so far.
        """
        row = self.num_rows
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        self.num_rows += 1
        self.seq_ids[row] = request.seq_id
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_tokens[row] = len(token_ids)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = _as_signed(sampling.seed)
        self.rank[row] = rank
        self.tenant_slot[row] = tenant_slot
        self.min_num_tokens[row] = min(num_prompt_tokens + sampling.min_tokens, self.max_model_len)
        self.max_num_tokens[row] = min(num_prompt_tokens + sampling.max_tokens, self.max_model_len)
        self.requests[row] = request
        self._set_stop_token_ids(row, request)
        return row

    def first_rows(self, count: int) -> Int32Array:
        """0, 1, 2, ...: int32[count], read-only."""
        return self._row_numbers[:count]

    def as_slice(self, rows: Int32Array) -> Rows:
        """`rows` as a slice when they are the first ones: the steady state of decoding."""
        num_rows = len(rows)
        if not num_rows or rows[-1] != num_rows - 1:
            return rows
        if rows.base is self._row_numbers:
            return slice(0, num_rows)
        is_all = np.count_nonzero(rows == self._row_numbers[:num_rows]) == num_rows
        return slice(0, num_rows) if is_all else rows

    def append_tokens(self, rows: Rows, token_ids: Int32Array) -> None:
        """Add one known token to each of `rows`: int32[number of rows]."""
        places = self._first_places[rows] + self.num_tokens[rows]
        self._flat_token_ids[places] = token_ids
        self.num_tokens[rows] += 1

    def pop_row(self) -> None:
        """Take back the last `add_row`."""
        self._clear(self.num_rows - 1, self.num_rows)
        self.num_rows -= 1
        self._narrow_stops()

    def arrange(self, keep: BoolArray) -> None:
        """Drop the rows outside `keep`, bool[num_rows], and bring the rows with one token left to the front."""
        num_old_rows = self.num_rows
        others = slice(self.num_decode_rows, num_old_rows)  # decode rows have one left again
        is_decode = keep.copy()
        is_decode[others] &= self.num_tokens[others] - self.num_computed_tokens[others] == 1
        split, end = int(np.count_nonzero(is_decode)), int(np.count_nonzero(keep))
        # As many decode rows sit behind the split as seats before it are wrong, and likewise for the rest.
        seats, movers = (~is_decode[:split]).nonzero()[0], split + is_decode[split:].nonzero()[0]
        if split < end:
            is_chunk = keep ^ is_decode
            seats = np.concatenate([seats, split + (~is_chunk[split:end]).nonzero()[0]])
            movers = np.concatenate([movers, is_chunk[:split].nonzero()[0], end + is_chunk[end:].nonzero()[0]])
        if len(movers):
            self._move(movers, seats)
        self._clear(end, num_old_rows)
        self.num_rows = end
        self.num_decode_rows = split
        self._narrow_stops()

    def _move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy rows `sources` to rows `targets` at once; the sets may overlap."""
        width = int(self.num_tokens[sources].max())
        self.token_ids[targets, :width] = self.token_ids[sources, :width]
        width = int(self.num_blocks[sources].max())
        self.block_table[targets, :width] = self.block_table[sources, :width]
        self.block_table[targets, width:] = NULL_BLOCK
        for columns in (self._int32_columns, self._int64_columns, self._bool_columns, self.stop_token_ids):
            columns[:, targets] = columns.take(sources, axis=1)
        moved = [self.requests[row] for row in sources.tolist()]
        for target, request in zip(targets.tolist(), moved, strict=True):
            self.requests[target] = request

    def _clear(self, start: int, end: int) -> None:
        """Leave rows start..end-1 without owner and blocks."""
        self.seq_ids[start:end] = -1
        self.block_table[start:end] = NULL_BLOCK
        self.num_computed_tokens[start:end] = 0
        self.num_blocks[start:end] = 0
        self.num_published_blocks[start:end] = 0
        self.num_resumed_tokens[start:end] = NEVER_RESUMED
        self._bool_columns[:, start:end] = False
        self.stop_token_ids[:, start:end] = NO_TOKEN
        self.requests[start:end] = [None] * (end - start)

    def _set_stop_token_ids(self, row: int, request: Request) -> None:
        """Fill the row's empty stop column: its stop token ids, and the model's own unless they are ignored."""
        eos_token_ids = () if request.sampling.ignore_eos else request.eos_token_ids
        if not eos_token_ids and not request.sampling.stop_token_ids:
            return
        stops = list(dict.fromkeys((*eos_token_ids, *request.sampling.stop_token_ids)))
        missing = len(stops) - len(self.stop_token_ids)
        if missing > 0:
            self.stop_token_ids = np.pad(self.stop_token_ids, ((0, missing), (0, 0)), constant_values=NO_TOKEN)
        self.stop_token_ids[: len(stops), row] = stops

    def _narrow_stops(self) -> None:
        """Give up places for stop token ids that no row uses: every step compares tokens with all of them."""
        width = len(self.stop_token_ids)
        while width > 1 and self.stop_token_ids[width - 1, : self.num_rows].max(initial=NO_TOKEN) == NO_TOKEN:
            width -= 1
        if width < len(self.stop_token_ids):
            self.stop_token_ids = self.stop_token_ids[:width].copy()


def _as_signed(seed: int) -> int:
    """The int64 with the same low 64 bits as `seed`."""
    low_bits = seed & 0xFFFF_FFFF_FFFF_FFFF
    return low_bits - (1 << 64) if low_bits >> 63 else low_bits
