"""The demo model on the CUDA path: scheduler, plans, graph in half precision, op library, kernels on the simulator."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from service.core.types import Request, SamplingParams
from service.executor.config import ExecutorConfig
from tests.cuda.host_device import HostDevice
from tests.cuda.host_executor import HostExecutor
from tests.cuda.simulated_kernels import SimulatedKernels
from tests.cudasim.build import missing_tool
from tests.stepping import run_requests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool())),
]

CASES = json.loads((Path(__file__).with_name("smollm2_greedy.json")).read_text())["cases"]
SHORT = (6, 8, 9, 10)  # prompts of 4 to 12 tokens
NUM_TOKENS = 8
NEAR_TIE = 0.05
HEAD_DIM = 64


def test_float16_greedy_tokens_equal_the_float32_reference(smollm2_export: Callable[[str], Path]) -> None:
    """One mixed step of four prompts, then decode steps of all four."""
    config = ExecutorConfig(
        model_dir=smollm2_export("float16"),
        kv_memory="16MiB",
        max_num_seqs=len(SHORT),
        max_num_batched_tokens=48,
        max_model_len=64,
        capture="off",
    )
    requests = [
        Request(
            seq_id=case,
            prompt_token_ids=np.array(CASES[case]["prompt_token_ids"], np.int32),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        )
        for case in SHORT
    ]
    assert min(min(CASES[case]["top1_top2_gap"][:NUM_TOKENS]) for case in SHORT) > NEAR_TIE
    with closing(SimulatedKernels(HEAD_DIM, config.block_size)) as kernels:
        device = HostDevice(kernels.gate.address, capacity_bytes=64 << 20)
        with closing(HostExecutor.create(config, kernels, device).executor) as executor:
            found = run_requests(executor, requests).tokens
    assert {case: CASES[case]["output_token_ids"][:NUM_TOKENS] for case in SHORT} == found
