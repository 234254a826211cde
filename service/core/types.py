"""The messages and array types that the core speaks. Pure: standard library and numpy."""

import enum
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
ObjectArray = npt.NDArray[np.object_]

NULL_BLOCK = 0
"""Block 0 belongs to nobody: padding rows and dummy steps write there."""

NO_BLOCKS: Final[Int32Array] = np.empty(0, np.int32)
NO_DIGEST: Final = b""
"""Of a block without a name."""


class FinishReason(enum.IntEnum):
    """Why a sequence ended. NONE: it has not."""

    NONE = 0
    STOP = 1  # an end-of-sequence token, a stop token id, or (set by the front side) a stop string
    LENGTH = 2  # max_tokens, or the model's context, is full
    CANCELLED = 3
    UNSERVICEABLE = 4  # could never fit the KV buffer
    ERROR = 5  # the model gave nothing to sample from
    DEADLINE = 6  # its deadline passed
    QUEUE_WAIT = 7  # it waited longer than the setting allows, and was never admitted


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one sequence is chosen, and when the sequence ends. Validated where it is made."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set with at least this mass; 1 keeps all
    min_p: float = 0.0  # drop tokens below min_p times the likeliest; 0 keeps all
    repetition_penalty: float = 1.0  # over prompt and output, multiplicative (CTRL); 1 is off
    frequency_penalty: float = 0.0  # per occurrence in the output
    presence_penalty: float = 0.0  # once per token that occurs in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0  # 64 bits; with the position it keys the random numbers
    num_logprobs: int = -1  # -1: none; 0: the chosen token's; n: and the n likeliest
    min_tokens: int = 0  # no stop token may be chosen before this many output tokens
    ignore_eos: bool = False  # the model's own end-of-sequence tokens do not end the sequence
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated. `seq_id` is unique in the life of the process."""

    seq_id: int
    prompt_token_ids: Int32Array  # [num_prompt_tokens], at least one
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    arrival_ns: int = 0
    priority: int = 0  # higher goes first, where the policy looks at it
    # What the digests of its blocks start from: requests with the same root share cached blocks. Empty: the tenant's.
    cache_root: bytes = b""
    block_digests: bytes = b""  # of the prompt's full blocks, one after the other; the missing ones are added in time
    deadline_ns: int | None = None  # when the whole answer is of no use any more, by the clock of `arrival_ns`
    fork_of: int | None = None  # the sequence with the same prompt, submitted before, whose blocks it shares


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the model's own logits, before any penalty, bias or temperature."""

    chosen: float
    top_token_ids: Int32Array  # [n], likeliest first
    top_logprobs: Float32Array  # [n]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced: a token for every row of the plan whose `samples` is set, in the plan's order."""

    token_ids: Int32Array  # [num_sampled]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # index into token_ids -> logprobs, where asked
    # [num_failed] indices into token_ids without meaning: the row's logits held NaN or +inf, or nothing but -inf
    failed: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    def of(self, indices: Int64Array) -> "StepResult":
        """The part of it that is at `indices` into token_ids, which ascend."""
        logprobs = self.logprobs  # mostly none, and then no index is looked at by itself
        if logprobs:
            logprobs = {new: logprobs[old] for new, old in enumerate(indices.tolist()) if old in logprobs}
        return StepResult(self.token_ids[indices], logprobs, np.isin(indices, self.failed).nonzero()[0])


@dataclass(frozen=True, slots=True)
class StepDelta:
    """What one commit changed, for the front side. Arrays are parallel, one entry per sampled token."""

    step_id: int
    seq_ids: Int64Array  # [num_sampled]
    token_ids: Int32Array  # [num_sampled]
    finish_reasons: Int8Array  # [num_sampled] FinishReason
    logprobs: dict[int, TokenLogprobs]  # index -> logprobs, where asked
    # seq_id -> prompt tokens found in the prefix cache, of sequences that began in this step and found any
    cached_prompt_tokens: dict[int, int] = field(default_factory=dict)
