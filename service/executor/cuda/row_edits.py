"""Divides a step's sampling between the device and the host, and packs the device's part for its kernel.

The kernel edits logits and reports log-probabilities by flat arrays (cuda/README.md, `sample_rows`), in buffers that
have a bound. Rows that do not fit, or ask for more of the likeliest tokens than there is room for, the host samples.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from service.core.types import Float32Array, Int32Array
from service.executor.logit_edits import LogitEdit, has_penalty
from service.executor.sampler import SamplingJob

NO_LOGPROBS: Final = -1
"""`num_logprobs` of a row that asks for none."""


@dataclass(frozen=True, slots=True)
class SamplingBounds:
    """What the device's buffers hold."""

    max_edits: int = 1 << 18  # of all rows of a step, each of one token's logit
    max_top: int = 20  # likeliest tokens of a row


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What the kernel changes in rows of logits and what it reports of them."""

    penalties: Float32Array  # [num_rows, 3] repetition, frequency, presence; of edited rows
    indptr: Int32Array  # [num_rows + 1] a row's edits are indptr[row] to indptr[row + 1]
    columns: Int32Array  # [3, num_edits] tokens, counts, and the bits of float32 biases
    num_logprobs: Int32Array  # [num_rows]


@dataclass(frozen=True, slots=True)
class DividedJob:
    """A step's sampling: which rows the host samples, and what the device does beyond the parameters of all rows."""

    job: SamplingJob
    host_rows: tuple[int, ...] = ()  # ascending
    edits: RowEdits | None = None  # None: nothing to edit, nothing to report
    num_logprobs: tuple[tuple[int, int], ...] = ()  # (row, likeliest tokens to report), of rows that the device samples

    @property
    def holds_up_next(self) -> bool:
        """True when the host must see this step's tokens before a step of the same rows can be sampled.

        It samples some of them itself, or the next step's penalties depend on them.
        """
        return bool(self.host_rows) or any(has_penalty(edit.params) for edit in self.job.edits.values())


def divide(job: SamplingJob, bounds: SamplingBounds) -> DividedJob:
    """Give the device what fits, first rows first."""
    if not job.edits and not job.num_logprobs:
        return DividedJob(job)
    host_rows = {row for row, num_top in job.num_logprobs.items() if num_top > bounds.max_top}
    columns: dict[int, Int32Array] = {}
    num_edits = 0
    for row, edit in job.edits.items():
        if row in host_rows:
            continue
        mine = edit_columns(edit)
        if num_edits + mine.shape[1] > bounds.max_edits:
            host_rows.add(row)
            continue
        columns[row] = mine
        num_edits += mine.shape[1]
    num_logprobs = {row: num_top for row, num_top in job.num_logprobs.items() if row not in host_rows}
    edits = _pack(job, columns, num_logprobs) if columns or num_logprobs else None
    return DividedJob(job, tuple(sorted(host_rows)), edits, tuple(num_logprobs.items()))


def edit_columns(edit: LogitEdit) -> Int32Array:
    """int32[3, num_edits] as in RowEdits: each token that may change once, in any order."""
    params = edit.params
    if not params.logit_bias and not len(edit.banned_token_ids):
        return np.stack([edit.seen, edit.num_uses, np.zeros_like(edit.seen)])
    biased = np.array([token_id for token_id, _ in params.logit_bias], np.int32)
    tokens = np.unique(np.concatenate([edit.seen, biased, edit.banned_token_ids]))
    columns: Int32Array = np.empty((3, len(tokens)), np.int32)
    columns[0] = tokens
    counts, biases = columns[1], columns[2].view(np.float32)
    counts[:] = -1
    biases[:] = 0.0
    counts[np.searchsorted(tokens, edit.seen)] = edit.num_uses
    biases[np.searchsorted(tokens, biased)] = [bias for _, bias in params.logit_bias]
    biases[np.searchsorted(tokens, edit.banned_token_ids)] = -np.inf
    return columns


def _pack(job: SamplingJob, columns: dict[int, Int32Array], num_logprobs: dict[int, int]) -> RowEdits:
    penalties: Float32Array = np.zeros((job.num_rows, 3), np.float32)
    indptr: Int32Array = np.zeros(job.num_rows + 1, np.int32)
    reported: Int32Array = np.full(job.num_rows, NO_LOGPROBS, np.int32)
    for row, mine in columns.items():
        params = job.edits[row].params
        penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        indptr[row + 1] = mine.shape[1]
    np.cumsum(indptr, out=indptr)
    packed: Int32Array = np.empty((3, indptr[-1]), np.int32)
    for row, mine in columns.items():
        packed[:, indptr[row] : indptr[row + 1]] = mine
    for row, num_top in num_logprobs.items():
        reported[row] = num_top
    return RowEdits(penalties, indptr, packed, reported)
