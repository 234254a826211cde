"""A toy language model on a paged buffer, and what a sequence must generate with it.

The next token is a hash of the whole token history, which the executor reads back through the block tables.
"""

import zlib
from itertools import accumulate

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

    def run(self, plan: StepPlan, batch: BatchState) -> StepResult:
        token_ids: list[int] = []
        failed: list[int] = []
        for block, host_block in plan.offload.tolist():
            self._host_blocks[host_block] = self._blocks[block]
        for host_block, block in plan.restore.tolist():
            self._blocks[block] = self._host_blocks[host_block]
        for source, target in plan.block_copies.tolist():
            self._blocks[target] = self._blocks[source]
        for row, count, samples in zip(plan.rows, plan.num_scheduled, plan.samples, strict=True):
            start = batch.num_computed_tokens[row]
            slots = self._write(batch, row, start + count)
            if samples:
                history, seed = self.slots[slots, 0].tolist(), int(batch.seed[row])
                if self.can_fail and fails(history, seed):
                    failed.append(len(token_ids))
                    self.slots[slots[start:], 0] = _GARBAGE
                token_ids.append(next_token(history, seed))
        logprobs = {
            index: TokenLogprobs(float(token_id), np.zeros(0, np.int32), np.zeros(0, np.float32))
            for index, token_id in enumerate(token_ids)
            if token_id % 2
        }
        return StepResult(np.array(token_ids, np.int32), logprobs, np.array(failed, np.int64))

    def holds_garbage(self, block: int) -> bool:
        """Whether a block holds what a failed row has written."""
        return _GARBAGE in self._blocks[block, :, 0].tolist()

    def _write(self, batch: BatchState, row: int, end: int) -> Int32Array:
        """Write a row's tokens that are not computed yet, up to `end`. Returns the slots of all up to there."""
        start = batch.num_computed_tokens[row]
        positions = np.arange(end)
        slots = batch.block_table[row, positions // self.block_size] * self.block_size
        slots += positions % self.block_size
        assert slots.min() >= self.block_size, "the null block is never written by a live sequence"
        token_ids = batch.token_ids[row, :end]
        self.slots[slots[start:], 0] = token_ids[start:]
        self.slots[slots[start:], 1] = positions[start:]
        hashes = list(accumulate(token_ids.tolist(), lambda before, token_id: hash((before, token_id)), initial=0))[1:]
        self.slots[slots[start:], 2] = hashes[start:]
        assert self.slots[slots, 1].tolist() == positions.tolist()
        assert self.slots[slots, 2].tolist() == hashes, "a block of another chain of tokens"
        return slots
