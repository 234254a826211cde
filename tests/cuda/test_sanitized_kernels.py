"""Every kernel under AddressSanitizer and ThreadSanitizer: nothing out of bounds, nothing unordered."""

import numpy as np
import pytest

from graphs.op_twins_attention import AttentionSpec
from tests.cuda.attention_problem import Problem
from tests.cuda.attention_runs import check_attention
from tests.cuda.sampling_rows import Rows, run_sample_rows
from tests.cudasim.build import missing_sanitizer, missing_tool
from tests.cudasim.sanitized import run_case

pytestmark = [
    pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool())),
    pytest.mark.slow,
]


def decode(device):
    problem = Problem((1, 17, 64, 0, 100), (1,) * 5, 3)
    check_attention(device, problem, "decode")
    check_attention(device, problem, "decode", chunk=64)


def prefill(device):
    check_attention(device, Problem((5, 97, 150), (3, 47, 3), 3), "prefill")


def decode_fp8(device):
    check_attention(device, Problem((1, 17, 70), (1, 1, 2), 4, is_fp8=True), "decode", chunk=64)


def rope(device):
    from tests.cuda.test_rope_kernel import RopeCase

    for options in ({}, {"has_norms": True, "rotary_half": 8, "is_fp8": True}):
        case = RopeCase(AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=96), "bf16", device=device, **options)
        case.run()
        case.check_queries("bf16")


def sampling(device):
    from tests.cuda.test_sample_kernel import edited_and_masked_rows

    rows = edited_and_masked_rows()
    assert rows.expected_tokens().tolist() == run_sample_rows(rows, device).tokens.tolist()


def sampling_of_an_odd_vocabulary(device):
    logits = np.random.default_rng(1).standard_normal((3, 1003)).astype(np.float16)
    rows = Rows.of(logits, top_k=20, top_p=[0.5, 0.9, 1.0], temperature=[0.0, 1.0, 2.0])
    assert rows.expected_tokens().tolist() == run_sample_rows(rows, device).tokens.tolist()


CASES = (decode, prefill, decode_fp8, rope, sampling, sampling_of_an_odd_vocabulary)


@pytest.mark.parametrize("flavour", ["asan", "tsan"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernel_is_clean(case, flavour):
    missing = missing_sanitizer(flavour)
    if missing is not None:
        pytest.skip(missing)
    outcome = run_case(flavour, 2, f"{__name__}:{case.__name__}")
    assert "" == outcome.fault
