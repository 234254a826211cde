"""The steps of the GPU check that ask whether kernels are right.

A step takes a device and yields rows for its table. It raises StepFailedError, or any other error, when it failed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from graphs.op_twins_attention import AttentionSpec
from service.executor.cuda.kernels import KernelConfig, Scalar
from tests.cuda.attention_problem import Problem, expected_attention, make_arrays
from tests.cuda.attention_runs import LIMIT, run_attention
from tests.cuda.gpu_check_device import CheckDevice, StepFailedError, as_row
from tests.cuda.sampling_rows import Rows, run_sample_rows
from tests.cuda.test_rope_kernel import RopeCase

Table = list[dict[str, object]]
REPEATS = {"sim": 2, "cuda": 20}
# Around blocks of 16 and 32 and tiles of 64; one empty row; the last sequence is the longest.
LENGTHS = (1, 15, 16, 17, 0, 31, 33, 63, 64, 65, 150)
SKEWED = (2047, 1, 2048, 33, 2049)


def environment(device: CheckDevice) -> Table:
    """Card, driver and versions."""
    return [device.describe()]


def compilation(device: CheckDevice) -> Table:
    """Kernels of a few configurations compiled and loaded; nothing spilled, and a block fits."""
    shapes = [(64, 64)] if device.name == "sim" else [(64, 64), (96, 32), (128, 32), (256, 32)]
    scalars = [Scalar.HALF] if device.name == "sim" else [Scalar.BF16, Scalar.HALF]
    rows = []
    for scalar, (head_dim, tile_tokens) in product(scalars, shapes):
        config = KernelConfig(scalar, head_dim, 16, tile_tokens, logit=scalar)
        rows += [as_row(config, used) for used in device.resources(config)]
    if spilled := sum(row["local_bytes"] != 0 for row in rows):
        raise StepFailedError(f"{spilled} of {len(rows)} kernels have stack or spills", rows)
    if unfit := sum(row["blocks_per_sm"] == 0 for row in rows):
        raise StepFailedError(f"{unfit} of {len(rows)} kernels fit no multiprocessor", rows)
    return rows


@dataclass(frozen=True)
class Case:
    """`run` yields what the kernels leave in outputs that began as NaN; `error` compares with the reference.

    `error` yields the largest error relative to its limit: at most 1 passes.
    """

    name: str
    run: Callable[[CheckDevice], list[np.ndarray]]
    error: Callable[[list[np.ndarray]], float]


def correctness(device: CheckDevice) -> Table:
    """Every kernel against float64 or its numpy twin, then again and again: equal bit for bit."""
    rows: Table = []
    for case in cases(device.name):
        first = case.run(device)
        error = case.error(first)
        bits = [each.tobytes() for each in first]
        repeats = [[each.tobytes() for each in case.run(device)] == bits for _ in range(REPEATS[device.name] - 1)]
        is_right = error <= 1 and all(repeats)  # an error of NaN is wrong
        cells = {"error / limit": f"{error:.4f}", "repeats equal": all(repeats), "right": is_right}
        rows.append({"case": case.name, **cells})
    if wrong := sum(not row["right"] for row in rows):
        raise StepFailedError(f"{wrong} of {len(rows)} cases are wrong", rows)
    return rows


def cases(device_name: str) -> Iterator[Case]:
    """Small ones for the simulator."""
    if device_name == "sim":
        shapes = [("bf16", 64, 3, 16)]
    else:
        groups = ((1, 16), (3, 32), (4, 16), (8, 32))
        shapes = [(scalar, dim, *group) for scalar, dim, group in product(("bf16", "half"), (64, 128), groups)]
    for scalar, head_dim, group_size, block_size in shapes:
        options = {"scalar": scalar, "head_dim": head_dim, "block_size": block_size}
        decoded = Problem(LENGTHS, (1,) * len(LENGTHS), group_size, **options)
        mixed = Problem((5, 97, 1, 0, 70, 150), (3, 47, 1, 1, 1, 30), group_size, **options)
        yield attention_case(decoded, "decode")
        yield attention_case(decoded, "decode", chunk=32)
        yield attention_case(mixed, "prefill")
        yield rope_case(scalar, head_dim, block_size)
    if device_name == "cuda":
        for scalar in ("bf16", "half"):
            yield attention_case(Problem(SKEWED, (1,) * 5, 4, scalar=scalar), "decode", chunk=512)
            yield attention_case(Problem(SKEWED, (100, 1, 17, 33, 65), 4, scalar=scalar), "prefill")
    yield sampling_case(4103 if device_name == "sim" else 151_936)


def attention_case(problem: Problem, shape: str, chunk: int = 0) -> Case:
    """Attention from its definition, in float64; cut sequences go through attn_combine."""
    arrays = make_arrays(problem)
    # Tiles of 32 fit every card's shared memory at these head dimensions.
    options = {"chunk": chunk, "tile_tokens": 64 if problem.head_dim == 64 else 32, "arrays": arrays}

    def error(outputs: list[np.ndarray]) -> float:
        expected = expected_attention(problem, arrays)
        distance = np.linalg.norm(outputs[0].astype(np.float64) - expected)
        return float(distance / np.linalg.norm(expected) / LIMIT[problem.scalar])

    name = f"attn_{shape}{' and attn_combine' if chunk else ''} {problem.scalar} D{problem.head_dim}"
    name += f" G{problem.group_size} BS{problem.block_size} longest {max(problem.context)}"
    return Case(name, lambda device: [run_attention(device, problem, shape, **options)], error)


def rope_case(scalar: str, head_dim: int, block_size: int) -> Case:
    """Rotated queries, keys and values that were written, against the op's twin."""
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    made: list[RopeCase] = []

    def run(device: CheckDevice) -> list[np.ndarray]:
        made[:] = [RopeCase(spec, scalar, block_size=block_size, has_norms=True, device=device)]
        made[0].run()
        return [made[0].q, made[0].kv]

    def error(_: list[np.ndarray]) -> float:
        case = made[0]
        queries, keys, values = case.expected()
        pairs = [(case.q.astype(np.float64), queries)]
        for token in case.written():
            pairs += [(case.stored(token, which), heads[token]) for which, heads in enumerate((keys, values))]
        errors = [np.linalg.norm(got - heads) / np.linalg.norm(heads) for got, heads in pairs]
        return float(np.max(errors) / LIMIT[scalar])  # np.max, unlike max, hands a NaN on

    return Case(f"rope_kv_write {scalar} D{head_dim} BS{block_size}", run, error)


def sampling_case(vocab_size: int) -> Case:
    """Tokens of the numpy twin, under every filter: any other token is an infinite error."""
    num_rows = 6
    logits = (3 * np.random.default_rng(5).standard_normal((num_rows, vocab_size))).astype(np.float32)
    rows = Rows.of(
        logits,
        temperature=[0.0, 0.8, 1.5, 1.0, 1.0, 0.7],
        top_k=[0, 40, 0, 1, 0, 200],
        top_p=[1.0, 0.9, 0.7, 1.0, 1.0, 0.95],
        min_p=[0, 0, 0.01, 0, 0, 0],
        seed=np.arange(num_rows),
    )

    def error(outputs: list[np.ndarray]) -> float:
        return float(np.inf if (outputs[0] != rows.expected_tokens()).any() else 0.0)

    return Case(f"sample_rows of {vocab_size} logits", lambda device: [run_sample_rows(rows, device).tokens], error)
