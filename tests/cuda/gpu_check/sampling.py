"""The sampling kernel: tokens of the numpy twin under every filter, and draws that follow their probabilities."""

import math
from collections.abc import Iterator
from itertools import product

import ml_dtypes
import numpy as np

from graphs.op_twins_rows import sample_rows
from service.core.types import SamplingParams
from service.executor.cuda.kernels import SLICE_LOGITS
from service.executor.logit_edits import log_softmax, token_logprobs
from tests.cuda.gpu_check.correctness import Case, check
from tests.cuda.gpu_check.device import CheckDevice
from tests.cuda.gpu_check.report import Row
from tests.cuda.sampling_rows import LOGITS, Rows, run_sample_rows
from tests.unit.edit_cases import edit_of

VOCAB_SIZES = (4_103, 50_257, 128_256, 151_936)
NUM_DRAWS = {"sim": 150, "cuda": 100_000}
LAUNCH_ROWS = 4_096  # of draws at a time: a row takes 25 KB of the workspace
DRAW_REPEATS = 2
SLICES_EACH = (1, 3)  # of a block, as in a small batch and in a large one
MAX_LOGPROB_ERROR = 1e-4  # sums of float32 in another order
CHANCE = 1e-6  # of a right kernel's failing: draws are the same in every run, so that one that passes always does


def sampling(device: CheckDevice) -> Iterator[Row]:
    is_sim = device.name == "sim"
    kinds = [("half", 4_103)] if is_sim else list(product(LOGITS, VOCAB_SIZES))
    cases = [
        make(*kind, slices_each=each) for kind in kinds for make in (twin_case, changed_case) for each in SLICES_EACH
    ]
    cases += [draws_case(NUM_DRAWS[device.name], top_k) for top_k in ((5,) if is_sim else (0, 5))]
    return check(device, cases)


def twin_case(logit: str, vocab_size: int, slices_each: int = 1) -> Case:
    """Any token but the twin's is an infinite error."""
    num_rows = 6
    logits = (3 * np.random.default_rng(5).standard_normal((num_rows, vocab_size))).astype(LOGITS[logit])
    rows = Rows.of(
        logits,
        temperature=[0.0, 0.8, 1.5, 1.0, 1.0, 0.7],
        top_k=[0, 40, 0, 1, 0, 200],
        top_p=[1.0, 0.9, 0.7, 1.0, 1.0, 0.95],
        min_p=[0, 0, 0.01, 0, 0, 0],
        seed=np.arange(num_rows),
    )

    num_blocks = blocks_of(rows, slices_each)

    def error(outputs: list[np.ndarray]) -> float:
        return float(np.inf if (outputs[0] != rows.expected_tokens()).any() else 0.0)

    return Case(
        f"sample_rows of {vocab_size} logits, {logit}",
        lambda device: [run_sample_rows(rows, device, num_blocks=num_blocks).tokens],
        error,
    )


def blocks_of(rows: Rows, slices_each: int) -> int:
    """As many as a device has to hold for a block to take so many slices of a row."""
    num_rows, vocab_size = rows.logits.shape
    return -(-num_rows * -(-vocab_size // SLICE_LOGITS) // slices_each)


def changed_case(logit: str, vocab_size: int, slices_each: int = 1) -> Case:
    """Masks, edits and log-probabilities; any other token or logit than the host's is an infinite error."""
    num_rows, rng = 8, np.random.default_rng(6)
    logits = (3 * rng.standard_normal((num_rows, vocab_size))).astype(LOGITS[logit])
    rows = Rows.of(
        logits, temperature=[0.0, 0.8] * 4, top_k=[0, 0, 40, 40] * 2, top_p=0.9, position=np.arange(num_rows)
    )
    rows.masks = {row: rng.random(vocab_size) < share for row, share in ((0, 0.5), (3, 0.01), (4, 0.1), (6, 0.0))}
    penalised = SamplingParams(max_tokens=1, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((7, 4.5),))
    rows.edits = {row: edit_of(penalised, range(5, 300), 100, banned=range(290, 310)) for row in (1, 4)}
    rows.num_logprobs = np.array([-1, 0, 3, 20] * 2, np.int32)

    def error(outputs: list[np.ndarray]) -> float:
        tokens, changed, logprob, top_tokens, top_logprobs = outputs
        expected = rows.changed_logits().astype(logits.dtype)
        if (tokens != expected_changed(rows, expected)).any() or changed.tobytes() != expected.tobytes():
            return math.inf
        errors = []
        for row, num_top in enumerate(rows.num_logprobs.tolist()):
            if num_top < 0 or tokens[row] < 0:
                continue
            exact = token_logprobs(log_softmax(logits[row].astype(np.float32)), int(tokens[row]), num_top)
            if (exact.top_token_ids != top_tokens[row, :num_top]).any():
                return math.inf
            errors += [exact.chosen - logprob[row], *(exact.top_logprobs - top_logprobs[row, :num_top])]
        return float(np.abs(errors).max() / MAX_LOGPROB_ERROR)

    def run(device: CheckDevice) -> list[np.ndarray]:
        found = run_sample_rows(rows, device, num_blocks=blocks_of(rows, slices_each))
        return [found.tokens, found.logits, found.logprob, found.top_tokens, found.top_logprobs]

    return Case(f"sample_rows of {vocab_size} masked and edited logits, {logit}", run, error)


def expected_changed(rows: Rows, changed: np.ndarray) -> np.ndarray:
    """Tokens of logits that were edited, masked and rounded: the twin's; -1 of rows in which nothing is left."""
    wide = changed.astype(np.float32)
    is_empty = ~np.isfinite(wide).any(axis=1)
    wide[is_empty] = 0.0
    return np.where(is_empty, -1, sample_rows(wide, *rows.columns))


def draws_case(num_draws: int, top_k: int) -> Case:
    """Rows of the same logits with seeds of their own; the error is Pearson's statistic over its critical value."""
    logits = np.linspace(-2, 2, 41).astype(ml_dtypes.bfloat16)
    temperature = 0.7
    weights = np.exp(logits.astype(np.float64) / temperature)
    if top_k:
        weights[:-top_k] = 0  # logits ascend
    expected = num_draws * weights / weights.sum()

    def error(outputs: list[np.ndarray]) -> float:
        return chi_square(outputs[0], expected)

    def run(device: CheckDevice) -> list[np.ndarray]:
        drawn = []
        for first in range(0, num_draws, LAUNCH_ROWS):
            seeds = np.arange(first, min(first + LAUNCH_ROWS, num_draws))
            rows = Rows.of(np.tile(logits, (len(seeds), 1)), temperature=temperature, top_k=top_k, seed=seeds)
            drawn.append(run_sample_rows(rows, device).tokens)
        return [np.concatenate(drawn)]

    return Case(f"chi-square of {num_draws} draws, top-k {top_k}", run, error, DRAW_REPEATS)


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic over the value that chance exceeds with probability CHANCE.

    Infinite for a token that cannot be drawn, or is none.
    """
    if ((tokens < 0) | (tokens >= len(expected))).any():
        return math.inf
    counts, possible = np.bincount(tokens, minlength=len(expected)), expected > 0
    if counts[~possible].any():
        return math.inf
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    return statistic / critical_value(int(possible.sum()) - 1, CHANCE)


def critical_value(freedom: int, chance: float) -> float:
    """What chi-square of an even number of degrees of freedom exceeds with probability `chance`."""
    assert freedom % 2 == 0, "only then is there a closed form"
    low, high = 0.0, 1.0
    while _exceeded(high, freedom) > chance:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeded(middle, freedom) > chance else (low, middle)
    return high


def _exceeded(value: float, freedom: int) -> float:
    half = value / 2
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(freedom // 2))
