"""Which attention is timed, and how many bytes and operations it takes."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

DECODE_BATCHES = (1, 8, 64, 256)
DECODE_CONTEXTS = (512, 2048, 8192, 32_768)


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} D{self.head_dim}"


HEADS = (Heads(32, 8, 128), Heads(9, 3, 64), Heads(32, 32, 96), Heads(16, 2, 256))


@dataclass(frozen=True)
class TimedCase:
    """One layer's attention for sequences of `contexts` tokens, of which the last `q_lens` are computed; bfloat16."""

    shape: str  # what the sequences are called, in tables
    q_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: Heads
    is_kv_fp8: bool = False
    is_deterministic: bool = False  # cut by each sequence's own length

    @property
    def name(self) -> str:
        kinds = f"{' e4m3' if self.is_kv_fp8 else ''}{' deterministic' if self.is_deterministic else ''}"
        return f"{self.shape}, {self.heads}{kinds}"

    @property
    def is_decode(self) -> bool:
        return max(self.q_lens) == 1

    @property
    def is_ragged(self) -> bool:
        """Whether sequences differ in length, which SDPA does not compute."""
        return len(set(self.contexts)) > 1 or len(set(self.q_lens)) > 1

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-context // block_size) for context in self.contexts)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values."""
        return 2 * self.heads.num_kv_heads * self.heads.head_dim * (1 if self.is_kv_fp8 else 2)

    @property
    def num_bytes(self) -> int:
        """All keys and values, read once; queries in and out."""
        return (
            sum(self.contexts) * self.token_bytes + 2 * self.num_tokens * self.heads.num_heads * self.heads.head_dim * 2
        )

    @property
    def num_operations(self) -> int:
        """Two products, a multiplication and an addition a pair, of the pairs that a causal mask leaves."""
        pairs = sum(q * context - q * (q - 1) // 2 for q, context in zip(self.q_lens, self.contexts, strict=True))
        return 4 * self.heads.head_dim * self.heads.num_heads * pairs


def decode_case(batch: int, context: int, heads: Heads, *, is_kv_fp8: bool = False) -> TimedCase:
    return TimedCase(f"decode {batch} x {context}", (1,) * batch, (context,) * batch, heads, is_kv_fp8)


def decode_cases() -> list[TimedCase]:
    """Those that a judgement waits for first, in case that the time runs out."""
    cases = [
        decode_case(batch, context, heads) for heads, context, batch in product(HEADS, DECODE_CONTEXTS, DECODE_BATCHES)
    ]
    e4m3 = [decode_case(batch, 2048, HEADS[0], is_kv_fp8=True) for batch in DECODE_BATCHES]
    fixed = [replace(decode_case(*shape, HEADS[0]), is_deterministic=True) for shape in ((64, 2048), (1, 8192))]
    first = len(DECODE_CONTEXTS) * len(DECODE_BATCHES)
    return [*cases[:first], *e4m3, *fixed, *cases[first:]]


def prefill_cases() -> list[TimedCase]:
    heads = HEADS[0]
    return [
        TimedCase("prefill 1 x 2048", (2048,), (2048,), heads),
        TimedCase("prefill 1 x 8192", (8192,), (8192,), heads),
        TimedCase("prefill 8 x 1024", (1024,) * 8, (1024,) * 8, heads),
        TimedCase("chunk of 512 at 8192", (512,), (8192,), heads),
        TimedCase("turn of 32 at 32800", (32,), (32_800,), heads),
        TimedCase("mixed 64 x 2048 + 1 x 1024", (*[1] * 64, 1024), (*[2048] * 64, 1024), heads),
    ]


def small_cases(cases: list[TimedCase]) -> list[TimedCase]:
    """One for the simulator."""
    heads = Heads(4, 2, 64)
    if cases[0].is_decode:
        return [decode_case(2, 100, heads)]
    return [TimedCase("mixed 2 x 100 + 1 x 40", (1, 1, 40), (100, 100, 40), heads)]
