"""A toy language model on a paged buffer, and what a sequence must generate with it.

The next token is a hash of the whole token history, which the executor reads back through the block tables.
"""

import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.scheduler import SchedulerConfig
from service.core.types import FinishReason, Int32Array, Request, StepResult, TokenLogprobs

VOCAB_SIZE = 31
EOS_TOKEN_ID = 0

_GARBAGE = VOCAB_SIZE  # no token: whoever reads it generates something else
_FAILURE_PERIOD = 17  # of so many tokens, one fails on average


def next_token(history: list[int], seed: int) -> int:
    return _hash(history, seed) % VOCAB_SIZE


def fails(history: list[int], seed: int) -> bool:
    """Whether a model that can fail has nothing to sample from after these tokens."""
    return _hash(history, seed) // VOCAB_SIZE % _FAILURE_PERIOD == 0


def _hash(history: list[int], seed: int) -> int:
    return zlib.crc32(np.asarray([*history, seed], np.int32).tobytes())


def tokens_alone(request: Request, config: SchedulerConfig, *, can_fail: bool) -> tuple[list[int], FinishReason]:
    """What the sequence generates when nothing else runs, and why it ends."""
    sampling = request.sampling
    history = request.prompt_token_ids.tolist()
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    output: list[int] = []
    while True:
        has_failed = can_fail and fails(history, sampling.seed)
        output.append(next_token(history, sampling.seed))
        history.append(output[-1])
        if has_failed:
            return output, FinishReason.ERROR
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(history) == config.max_model_len:
            return output, FinishReason.LENGTH
        if len(history) > (config.num_blocks - 1) * config.block_size:
            return output, FinishReason.UNSERVICEABLE


class StagedRow(NamedTuple):
    """What a row of a step needs of the batch."""

    slots: Int32Array  # [num_tokens] of all positions up to the last one of the step
    start: int  # the first position to compute
    token_ids: list[int]  # all known ones up to the last one of the step
    continued: int | None  # of a step planned ahead, which sample of the step before follows them
    seed: int
    samples: bool


@dataclass
class StagedStep:
    """A step as the device sees it: what happens to the batch afterwards is nothing to it."""

    offload: list[list[int]]
    restore: list[list[int]]
    block_copies: list[list[int]]
    rows: list[StagedRow]
    before: "StagedStep | None"
    result: StepResult | None = None


class ToyExecutor:
    """A paged buffer that holds (token, position, hash of all tokens so far) instead of K and V, and a host's below it.

    What a failed row has written is garbage, as is what nobody has written.
    """

    def __init__(self, config: SchedulerConfig, *, can_fail: bool) -> None:
        self.can_fail = can_fail
        self.block_size = config.block_size
        self.slots = np.full((config.num_blocks * config.block_size, 3), -1, np.int64)
        self._blocks = self.slots.reshape(config.num_blocks, config.block_size, 3)
        self._host_blocks = np.full((config.num_host_blocks, config.block_size, 3), -1, np.int64)

    def stage(self, plan: StepPlan, batch: BatchState, before: "StagedStep | None" = None) -> "StagedStep":
        """Read all that a step needs. `before` is the step that a step planned ahead goes on with."""
        num_continuing = len(plan.continues)
        num_in_flight = plan.num_in_flight if plan.is_ahead else np.zeros_like(plan.rows)
        rows = []
        for index, (row, count, samples) in enumerate(zip(plan.rows, plan.num_scheduled, plan.samples, strict=True)):
            start = int(batch.num_computed_tokens[row] + num_in_flight[index])
            positions = np.arange(start + count)
            slots = batch.block_table[row, positions // self.block_size] * self.block_size
            slots += positions % self.block_size
            assert slots.min() >= self.block_size, "the null block is never written by a live sequence"
            is_continuing = index < num_continuing
            tokens = batch.token_ids[row, : start + count - is_continuing].tolist()
            assert len(tokens) <= batch.num_tokens[row], "what is not known is sampled by the step before"
            continued = int(plan.continues[index]) if is_continuing else None
            rows.append(StagedRow(slots, start, tokens, continued, int(batch.seed[row]), bool(samples)))
        copies = (plan.offload.tolist(), plan.restore.tolist(), plan.block_copies.tolist())
        return StagedStep(*copies, rows, before)

    def run(self, step: "StagedStep") -> StepResult:
        """Write the step's tokens and choose the next ones; once, whoever asks again gets the same."""
        if step.result is not None:
            return step.result
        token_ids: list[int] = []
        failed: list[int] = []
        for block, host_block in step.offload:
            self._host_blocks[host_block] = self._blocks[block]
        for host_block, block in step.restore:
            self._blocks[block] = self._host_blocks[host_block]
        for source, target in step.block_copies:
            self._blocks[target] = self._blocks[source]
        for row in step.rows:
            tokens, new = row.token_ids, row.slots[row.start :]
            if row.continued is not None:
                assert step.before is not None and step.before.result is not None, "steps run in order"
                tokens = [*tokens, int(step.before.result.token_ids[row.continued])]
            hashes = list(accumulate(tokens, lambda before, token_id: hash((before, token_id)), initial=0))[1:]
            self.slots[new, 0] = tokens[row.start :]
            self.slots[new, 1] = np.arange(row.start, len(row.slots))
            self.slots[new, 2] = hashes[row.start :]
            assert self.slots[row.slots, 1].tolist() == list(range(len(row.slots)))
            assert self.slots[row.slots, 2].tolist() == hashes, "a block of another chain of tokens"
            if row.samples:
                history = self.slots[row.slots, 0].tolist()
                if self.can_fail and fails(history, row.seed):
                    failed.append(len(token_ids))
                    self.slots[new, 0] = _GARBAGE
                token_ids.append(next_token(history, row.seed))
        logprobs = {
            index: TokenLogprobs(float(token_id), np.zeros(0, np.int32), np.zeros(0, np.float32))
            for index, token_id in enumerate(token_ids)
            if token_id % 2
        }
        step.result = StepResult(np.array(token_ids, np.int32), logprobs, np.array(failed, np.int64))
        step.before = None
        return step.result

    def holds_garbage(self, block: int) -> bool:
        """Whether a block holds what a failed row has written."""
        return _GARBAGE in self._blocks[block, :, 0].tolist()
