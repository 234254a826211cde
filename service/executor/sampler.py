"""Chooses the next tokens: rare features edit rows of logits, then one op samples all rows at once."""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from service.core.batch_state import BatchState
from service.core.types import Float32Array, Int8Array, Int32Array, Int64Array, StepResult
from service.errors import ExecutorError
from service.executor.buffers import aligned_zeros
from service.executor.logit_edits import LogitEdit, is_edited, log_softmax, token_logprobs, unusable_rows
from service.executor.seen_tokens import SeenTokens

_EDITED: Final = 1
_WITH_LOGPROBS: Final = 2


@dataclass(frozen=True, slots=True)
class RowParams:
    """One entry per sampled row, in the order of the logits."""

    temperature: Float32Array  # [num_sampled] 0 is greedy
    top_k: Int32Array  # [num_sampled] 0 keeps all
    top_p: Float32Array  # [num_sampled]
    min_p: Float32Array  # [num_sampled]
    seed: Int64Array  # [num_sampled]
    position: Int32Array  # [num_sampled] index in its sequence of the token being chosen

    def prefix(self, length: int) -> "RowParams":
        """Views of the first `length` entries."""
        return RowParams(*(getattr(self, name)[:length] for name in self.__slots__))


class RowSampler(Protocol):
    """The op `chairlift.SampleRows` over arrays that were given when it was made."""

    def sample(self, num_rows: int) -> Int32Array:
        """Token ids `[num_rows]` for the first `num_rows` rows. Raises ExecutorError when one cannot be sampled."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """What sampling one step takes besides the logits."""

    num_rows: int
    edits: dict[int, LogitEdit]  # row of the logits -> what to change
    num_logprobs: dict[int, int]  # row of the logits -> how many of the likeliest tokens to report


class Sampler:
    """Samples a step's rows. Owned by the engine thread.

    Most steps sample the sequences of the step before, in the same order: then only positions are gathered. Which
    sequences ask for rare features is looked up once for each row of the BatchState that a sequence takes.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.params = RowParams(
            temperature=aligned_zeros((max_num_seqs,), np.float32),
            top_k=aligned_zeros((max_num_seqs,), np.int32),
            top_p=aligned_zeros((max_num_seqs,), np.float32),
            min_p=aligned_zeros((max_num_seqs,), np.float32),
            seed=aligned_zeros((max_num_seqs,), np.int64),
            position=aligned_zeros((max_num_seqs,), np.int32),
        )
        self._batch: BatchState | None = None  # the one that the next three describe
        self._last_seq_ids: Int64Array = np.empty(0, np.int64)  # sequences whose parameters stand in `params`
        self._known_seq_ids: Int64Array = np.full(max_num_seqs, -1, np.int64)
        self._features: Int8Array = np.zeros(max_num_seqs, np.int8)
        self._rare: list[tuple[int, int]] = []  # (place in `params`, features) of sequences that have any
        self._seen: dict[int, SeenTokens] = {}  # by seq_id, of sequences whose logits are edited

    def prepare(self, batch: BatchState, rows: Int32Array, num_continuing: int = 0) -> SamplingJob:
        """Gather the parameters of `rows`, the rows of `batch` that sample, in the order of their logits.

        The first `num_continuing` have a token more than the batch knows: none of them may have a penalty, which
        depends on it.
        """
        if batch is not self._batch:
            self._forget(batch)
        num_rows = len(rows)
        position = batch.num_tokens.take(rows, out=self.params.position[:num_rows], mode="clip")
        position[:num_continuing] += 1
        seq_ids = batch.seq_ids[rows]
        if not np.array_equal(seq_ids, self._last_seq_ids):
            self._gather(batch, rows)
            self._look_up(batch, rows[self._known_seq_ids[rows] != seq_ids])
            self._last_seq_ids = seq_ids
            features = self._features[rows]
            self._rare = [(index, int(features[index])) for index in np.flatnonzero(features).tolist()]
            edited = [int(seq_ids[index]) for index, of_row in self._rare if of_row & _EDITED]
            self._seen = {seq_id: self._seen.get(seq_id) or SeenTokens() for seq_id in edited}
        job = SamplingJob(num_rows=num_rows, edits={}, num_logprobs={})
        for index, features_here in self._rare:
            row = int(rows[index])
            request = batch.requests[row]
            assert request is not None, "only rows with parameters have features"
            sampling = request.sampling
            if features_here & _EDITED:
                seen = self._seen[int(seq_ids[index])]
                num_ahead = int(index < num_continuing)
                job.edits[index] = LogitEdit.of(batch, row, sampling, seen, num_ahead=num_ahead)
            if features_here & _WITH_LOGPROBS:
                job.num_logprobs[index] = sampling.num_logprobs
        return job

    def finish(self, job: SamplingJob, logits: Float32Array, row_sampler: RowSampler) -> StepResult:
        """Sample the rows of `job` from `logits` `[num_rows, vocab_size]`, which is changed in place.

        A row whose logits cannot be sampled from fails alone. Raises ExecutorError when sampling fails otherwise.
        """
        with np.errstate(invalid="ignore"):  # rows that are not finite fail below
            logprobs = {index: log_softmax(logits[index]) for index in job.num_logprobs}
            for index, edit in job.edits.items():
                edit.apply(logits[index])
        failed: Int64Array = np.empty(0, np.int64)
        try:
            token_ids = row_sampler.sample(job.num_rows)
        except ExecutorError:
            failed = unusable_rows(logits)
            if not len(failed):
                raise
            logits[failed] = 0.0  # any token will do
            token_ids = row_sampler.sample(job.num_rows)
        return StepResult(
            token_ids=token_ids,
            logprobs={
                index: token_logprobs(logprobs[index], int(token_ids[index]), num_top)
                for index, num_top in job.num_logprobs.items()
            },
            failed=failed,
        )

    def _forget(self, batch: BatchState) -> None:
        self._batch = batch
        self._last_seq_ids = np.empty(0, np.int64)
        self._known_seq_ids[:] = -1
        self._rare = []
        self._seen = {}

    def _gather(self, batch: BatchState, rows: Int32Array) -> None:
        """The columns that stay the same while the same sequences sample in the same order."""
        params = self.params.prefix(len(rows))
        params.temperature[:] = batch.temperature[rows]
        params.top_k[:] = batch.top_k[rows]
        params.top_p[:] = batch.top_p[rows]
        params.min_p[:] = batch.min_p[rows]
        params.seed[:] = batch.seed[rows]

    def _look_up(self, batch: BatchState, rows: Int32Array) -> None:
        """Find out which features the sequences that are new in `rows` ask for."""
        for row in rows.tolist():
            request = batch.requests[row]
            self._known_seq_ids[row] = batch.seq_ids[row]
            self._features[row] = 0
            if request is not None:
                sampling = request.sampling
                has_logprobs = sampling.num_logprobs >= 0
                self._features[row] = _EDITED * is_edited(sampling) | _WITH_LOGPROBS * has_logprobs
