"""One small case for each kernel, for runs under sanitizers and of kernels with seeded bugs.

Cases raise AssertionError for a wrong result. Shapes are small and odd; the last sequence is the longest, ends within a
block and fills its row of the block table, so that reading on leaves the table.
"""

from collections.abc import Callable

import numpy as np

from graphs.op_twins_attention import AttentionSpec
from service.core.types import SamplingParams
from service.executor.cuda.kernels import PrefillShape
from tests.cuda.attention_problem import Problem
from tests.cuda.attention_runs import check_attention
from tests.cuda.sampling_rows import Rows, run_sample_rows
from tests.cuda.test_rope_kernel import RopeCase
from tests.cudasim.device import SimDevice
from tests.unit.edit_cases import edit_of


def decode(device: SimDevice) -> None:
    """Whole and cut sequences, an empty row, several items a block of threads, the merge of cut ones."""
    problem = Problem((17, 0, 64, 1, 150), (1,) * 5, 3)
    check_attention(device, problem, "decode")
    check_attention(device, problem, "decode", chunk=64)


def decode_fp8(device: SimDevice) -> None:
    check_attention(device, Problem((17, 0, 150), (1, 1, 2), 3, is_fp8=True, k_scale=0.5, v_scale=2.0), "decode")


def prefill(device: SimDevice) -> None:
    """Chunks and single tokens, more blocks of threads than items."""
    check_attention(device, Problem((5, 1, 0, 150), (3, 1, 1, 30), 3), "prefill")


def prefill_wide(device: SimDevice) -> None:
    """Two items of 128 rows, 32 a warp; tiles of 64."""
    check_attention(device, Problem((5, 150), (3, 60), 3), "prefill", prefill=PrefillShape(128, 4, 64))


def prefill_fp8(device: SimDevice) -> None:
    check_attention(device, Problem((5, 150), (3, 30), 3, is_fp8=True, k_scale=0.5, v_scale=2.0), "prefill")


def prefill_cut(device: SimDevice) -> None:
    """Whole items and pieces, of which one is behind what some rows see; their merge."""
    check_attention(device, Problem((5, 110), (3, 30), 3), "prefill", chunk=64)


def rope(device: SimDevice) -> None:
    """Five heads for two blocks of four warps; a padding token; norms."""
    case = RopeCase(AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=64), "half", has_norms=True, device=device)
    case.run()
    case.check_queries("half")
    _, keys, values = case.expected()
    for token in case.written():
        for which, heads in enumerate((keys[token], values[token])):
            assert np.allclose(case.stored(token, which), heads, rtol=1e-3, atol=2e-6), f"token {token} is wrong"
    assert (case.kv == 7.0).sum() == case.kv.size - 2 * 64 * len(case.written())


def rope_fp8(device: SimDevice) -> None:
    """A part of each head rotated, keys and values of one byte."""
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=96)
    case = RopeCase(spec, "bf16", has_norms=True, rotary_half=8, is_fp8=True, device=device)
    case.run()
    case.check_queries("bf16")


def sampling(device: SimDevice) -> None:
    """Every filter, edits and masks of the same tokens, log-probabilities; two slices a row."""
    logits = (3 * np.random.default_rng(5).standard_normal((3, 4103))).astype(np.float32)
    rows = Rows.of(logits, temperature=[0.0, 0.8, 1.5], top_k=[0, 40, 0], top_p=[1.0, 0.9, 0.7], min_p=[0, 0, 0.01])
    params = SamplingParams(max_tokens=1, logit_bias=tuple((token, 1.5) for token in range(0, 64, 3)))
    rows.edits = {1: edit_of(params, [3, 4, 5, 5], 2, banned=[6])}
    rows.masks = {1: np.random.default_rng(6).random(4103) < 0.5}
    rows.num_logprobs = np.array([2, 1, -1], np.int32)
    sampled = run_sample_rows(rows, device)
    assert rows.expected_tokens().tolist() == sampled.tokens.tolist()


def sampling_half(device: SimDevice) -> None:
    """Logits of two bytes, an odd number of them in a row."""
    logits = np.random.default_rng(1).standard_normal((3, 1003)).astype(np.float16)
    rows = Rows.of(logits, top_k=20, top_p=[0.5, 0.9, 1.0], temperature=[0.0, 1.0, 2.0])
    assert rows.expected_tokens().tolist() == run_sample_rows(rows, device).tokens.tolist()


def sampling_unsure(device: SimDevice) -> None:
    """Rows that are drawn from what a filter leaves: a list of tokens, and more of them than a list holds."""
    logits = np.random.default_rng(2).standard_normal((4, 4200)).astype(np.float16)
    logits[2:, :4150] = 5.0 - 0.05 * np.linspace(0, 1, 4150)
    rows = Rows.of(logits, top_k=[3, 0, 3, 0], top_p=[0.9, 0.02, 1.0, 0.02], temperature=2.0, position=[0, 1, 2, 4])
    assert rows.expected_tokens().tolist() == run_sample_rows(rows, device).tokens.tolist()


CASES: dict[str, Callable[[SimDevice], None]] = {
    each.__name__: each
    for each in (
        decode,
        decode_fp8,
        prefill,
        prefill_wide,
        prefill_fp8,
        prefill_cut,
        rope,
        rope_fp8,
        sampling,
        sampling_half,
        sampling_unsure,
    )
}


def run(device: SimDevice, *names: str) -> None:
    """What `tests.cudasim.sanitized.run_case` runs in its process."""
    for name in names:
        CASES[name](device)
