"""Attention, rotation and KV write against float64, then again and again: equal bit for bit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import ml_dtypes
import numpy as np

from graphs.op_twins_attention import AttentionSpec
from service.executor.cuda.kernels import BLOCK_SIZES, HEAD_DIMS, choose_prefill_shape, choose_tile_tokens
from tests.cuda.attention_problem import E4M3, Problem, expected_attention, make_arrays
from tests.cuda.attention_runs import LIMIT, run_attention
from tests.cuda.gpu_check.attention_cases import Heads, TimedCase, prefill_cases
from tests.cuda.gpu_check.attention_step import AttentionStep
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.test_rope_kernel import RopeCase

REPEATS = {"sim": 2, "cuda": 20}
GROUP_SIZES = (1, 3, 4, 8)
SCALARS = ("bf16", "half")
FP8 = {"is_fp8": True, "k_scale": 0.5, "v_scale": 2.0}
E4M3_LIMIT = 0.05  # a number of 4 significant bits is off by at most 1/17 of itself, on average by less
# Around blocks of 16 and 32 and tiles of 64; one empty row; the last sequence is the longest.
LENGTHS = (1, 15, 16, 17, 0, 31, 33, 63, 64, 65, 150)
SKEWED = (2047, 1, 2048, 33, 2049)


@dataclass(frozen=True)
class Case:
    """`run` yields what the kernels leave in outputs that began as NaN; `error` compares with the reference.

    `error` yields the largest error relative to its limit: at most 1 passes. Cases of one `family` share a row.
    """

    family: str
    run: Callable[[CheckDevice], list[np.ndarray]]
    error: Callable[[list[np.ndarray]], float]
    max_repeats: int = 20  # of `run`, where REPEATS has more


def attention(device: CheckDevice) -> Iterator[Row]:
    return check(device, [*attention_cases(device.name), *map(planned_case, planned_steps(device.name))])


def rope(device: CheckDevice) -> Iterator[Row]:
    return check(device, rope_cases(device.name))


def check(device: CheckDevice, cases: Sequence[Case]) -> Iterator[Row]:
    """A row for each family. Raises StepFailedError in the end."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    num_wrong = 0
    for family, members in families.items():
        try:
            row = _row(device, members)
        except Exception as error:  # of a launch, say; the next kernel may still run
            row = {"right": False, "said": f"{type(error).__name__}: {error}"}
        num_wrong += not row["right"]
        yield {"cases": family, "number": len(members), **row}
    if num_wrong:
        raise StepFailedError(f"{num_wrong} of {len(families)} rows are wrong")


def _row(device: CheckDevice, cases: Sequence[Case]) -> Row:
    judged = [_judge(device, each) for each in cases]
    worst = float(np.max([error for error, _ in judged]))  # np.max, unlike max, hands a NaN on
    equal = all(is_equal for _, is_equal in judged)
    is_right = worst <= 1 and equal  # an error of NaN is wrong
    return {"worst error / limit": f"{worst:.4f}", "repeats equal": equal, "right": is_right}


def _judge(device: CheckDevice, case: Case) -> tuple[float, bool]:
    first = case.run(device)
    error = case.error(first)
    bits = [each.tobytes() for each in first]
    repeats = range(min(REPEATS[device.name], case.max_repeats) - 1)
    return error, all([each.tobytes() for each in case.run(device)] == bits for _ in repeats)


def attention_cases(device_name: str) -> list[Case]:
    """All of types, head dimensions, block sizes, kinds of KV and groups; on the simulator one each."""
    if device_name == "sim":
        shapes = [("bf16", 64, 16, {}, 3), ("half", 96, 32, {}, 4), ("half", 64, 16, FP8, 8)]
    else:
        shapes = list(product(SCALARS, HEAD_DIMS, BLOCK_SIZES, ({}, FP8), GROUP_SIZES))
    cases = []
    for scalar, head_dim, block_size, kv, group_size in shapes:
        options = {"scalar": scalar, "head_dim": head_dim, "block_size": block_size, **kv}
        cases += mixed_cases(group_size, options, is_small=device_name == "sim")
    if device_name == "cuda":
        for scalar, head_dim in product(SCALARS, HEAD_DIMS):
            cases += long_cases(scalar, head_dim)
    return cases


def mixed_cases(group_size: int, options: dict, *, is_small: bool) -> Iterator[Case]:
    """Decode whole, cut and of several tokens a sequence; chunks and single tokens."""
    lengths = LENGTHS[-4:] if is_small else LENGTHS
    decoded = Problem(lengths, (1,) * len(lengths), group_size, **options)
    verified = Problem(
        (1, 40, 70, 160), (1, 1, min(2, 16 // group_size), min(5, 16 // group_size)), group_size, **options
    )
    chunks = Problem((5, 97, 1, 0, 70, 150), (3, 47, 1, 1, 1, 30), group_size, **options)
    yield attention_case(decoded, "decode", chunk=32)
    yield attention_case(chunks, "prefill")
    yield attention_case(chunks, "prefill", chunk=64)
    if not is_small:
        yield attention_case(decoded, "decode")
        yield attention_case(verified, "decode")
        yield attention_case(verified, "decode", chunk=64)


def long_cases(scalar: str, head_dim: int) -> Iterator[Case]:
    """Two thousand tokens beside single ones; windows and soft caps."""
    options = {"scalar": scalar, "head_dim": head_dim}
    for q_lens, shape, chunk in (
        ((1,) * 5, "decode", 512),
        ((1,) * 5, "decode", 0),
        ((100, 1, 17, 33, 65), "prefill", 0),
        ((100, 1, 17, 33, 65), "prefill", 448),
    ):
        yield attention_case(Problem(SKEWED, q_lens, 4, **options), shape, chunk)
    for changes, shape in product(({"window": 20}, {"window": 70}, {"softcap": 1.5}), ("decode", "prefill")):
        yield attention_case(Problem((5, 40, 70, 160), (1, 1, 2, 5), 3, **changes, **options), shape)


def attention_case(problem: Problem, shape: str, chunk: int = 0) -> Case:
    """Attention from its definition, in float64; cut sequences go through attn_combine."""
    made = cache(lambda: make_arrays(problem))  # not before the case's turn

    def run(device: CheckDevice) -> list[np.ndarray]:
        at_hand = (problem.head_dim, problem.is_fp8, device.max_shared_bytes)
        shapes = {"tile_tokens": choose_tile_tokens(*at_hand), "prefill": choose_prefill_shape(*at_hand)}
        return [run_attention(device, problem, shape, chunk=chunk, arrays=made(), **shapes)]

    def error(outputs: list[np.ndarray]) -> float:
        expected = expected_attention(problem, made())
        distance = np.linalg.norm(outputs[0].astype(np.float64) - expected)
        return float(distance / np.linalg.norm(expected) / LIMIT[problem.scalar])

    return Case(_family(problem, shape, chunk), run, error)


def _family(problem: Problem, shape: str, chunk: int) -> str:
    name = f"attn_{shape}{' + attn_combine' if chunk else ''} {problem.scalar} D{problem.head_dim}"
    extras = [
        f"{what} {value:g}" for what, value in (("window", problem.window), ("soft cap", problem.softcap)) if value
    ]
    if max(problem.context) >= max(SKEWED):
        extras.append("long")
    return " ".join([name, f"BS{problem.block_size}", "e4m3" if problem.is_fp8 else "same KV", *extras])


def planned_steps(device_name: str) -> list[TimedCase]:
    """A short turn behind a long prefix, which alone is cut; a prompt beside sequences that are."""
    if device_name == "cuda":
        return [each for each in prefill_cases() if each.shape.startswith(("turn", "mixed"))]
    heads = Heads(4, 2, 64)
    return [
        TimedCase("turn of 20 at 700", (20,), (700,), heads),
        TimedCase("mixed 2 x 100 + 1 x 40", (1, 1, 40), (100, 100, 40), heads),
    ]


def planned_case(step: TimedCase) -> Case:
    """The product's plan and its deterministic one, which cuts no prefill: any row of theirs is nearly the same."""

    def run(device: CheckDevice) -> list[np.ndarray]:
        outputs, items = [], []
        for is_deterministic in (False, True):
            changed = replace(step, is_deterministic=is_deterministic)
            with closing(AttentionStep(device, changed, 1)) as opened:
                opened(0)
                outputs.append(opened.output())
                items.append(opened.counts.num_prefill_items)
        if not step.is_ragged and items[0] <= items[1]:
            raise StepFailedError(f"{step.name}: the plan cuts none of {items[1]} items")
        return outputs

    def error(outputs: list[np.ndarray]) -> float:
        cut, whole = (each.view(ml_dtypes.bfloat16).astype(np.float64) for each in outputs)
        distance = np.linalg.norm(cut - whole, axis=-1) / np.linalg.norm(whole, axis=-1)
        return float(distance.max() / (2 * LIMIT["bf16"]))  # each may be off by the limit

    return Case(f"planned {step.name}", run, error, max_repeats=2)


def rope_cases(device_name: str) -> list[Case]:
    if device_name == "sim":
        shapes = [("half", 64, 16, False), ("bf16", 96, 32, True)]
    else:
        shapes = list(product(SCALARS, HEAD_DIMS, BLOCK_SIZES, (False, True)))
    return [rope_case(*shape, has_norms=has_norms) for shape in shapes for has_norms in (False, True)]


def rope_case(scalar: str, head_dim: int, block_size: int, is_fp8: bool, *, has_norms: bool) -> Case:
    """Rotated queries, keys and values that were written, against the op's twin."""
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    options = {"block_size": block_size, "has_norms": has_norms, "is_fp8": is_fp8}
    options |= {"scales": (0.5, 0.25)} if is_fp8 else {}
    made: list[RopeCase] = []

    def run(device: CheckDevice) -> list[np.ndarray]:
        made[:] = [RopeCase(spec, scalar, device=device, **options)]
        made[0].run()
        return [made[0].q, made[0].kv]

    def error(_: list[np.ndarray]) -> float:
        case = made[0]
        queries, keys, values = case.expected()
        limit = E4M3_LIMIT if case.kv.dtype == E4M3 else LIMIT[scalar]
        errors = [_distance(case.q, queries) / LIMIT[scalar]]
        for token in case.written():
            errors += [
                _distance(case.stored(token, which), heads[token]) / limit for which, heads in enumerate((keys, values))
            ]
        return float(np.max(errors))

    return Case(f"rope_kv_write {scalar} D{head_dim} BS{block_size} {'e4m3' if is_fp8 else 'same KV'}", run, error)


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))
