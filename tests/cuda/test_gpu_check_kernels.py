"""The kernels that the GPU check times beside attention, on the simulator: what is timed is what they are for."""

import ml_dtypes
import numpy as np
import pytest

from service.executor.cuda.kernels import SAMPLE_KERNELS, KernelConfig, Scalar
from tests.cuda.gpu_check.device import open_device
from tests.cuda.gpu_check.kernel_times import KINDS, VOCAB_SIZE, kernel_times, rotation, sampling
from tests.cuda.sampling_rows import Rows, sample_grid
from tests.cuda.sim_kernels import Out, SimKernels
from tests.cudasim.build import missing_tool

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

CONFIG = KernelConfig(Scalar.BF16, 128, 16, 64, logit=Scalar.BF16)
LOGITS, TOKEN, WORKSPACE, Q, KV = 0, 16, 20, 7, 8  # places of arguments


@pytest.fixture
def device(tmp_path):
    with open_device("sim", tmp_path) as opened:
        yield opened


def test_every_kind_of_sampling_and_the_rotation_are_timed(device):
    rows = list(kernel_times(device))
    assert [" + ".join(SAMPLE_KERNELS)] * len(KINDS) + ["rope_kv_write"] == [row["kernel"] for row in rows]
    assert all(row["us"] > 0 for row in rows)
    megabytes = 2 * VOCAB_SIZE["sim"] * 2 / 1e6  # of two rows
    assert [round(passes * megabytes, 2) for passes in (1, 1, 2, 2)] == [row["MB"] for row in rows[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_timed_sampling_chooses_the_twins_tokens(device, kind):
    arguments = sampling(device, 2, KINDS[kind])
    temperature, top_k, top_p = KINDS[kind]
    logits = arguments[LOGITS].view(ml_dtypes.bfloat16).astype(np.float32)
    expected = Rows.of(logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=np.arange(2)).expected_tokens()
    arguments[TOKEN], arguments[WORKSPACE] = Out(arguments[TOKEN]), Out(arguments[WORKSPACE])
    kernels = SimKernels(CONFIG, device)
    for name in SAMPLE_KERNELS:
        kernels.launch(name, sample_grid(name, 2, VOCAB_SIZE["sim"]), *arguments)
    assert expected.tolist() == arguments[TOKEN].array.tolist()


def test_timed_rotation_writes_every_slot_of_its_tokens(device):
    arguments = rotation(3)
    arguments[Q], arguments[KV] = Out(arguments[Q]), Out(arguments[KV])
    SimKernels(CONFIG, device).launch("rope_kv_write", (3, 12), *arguments)
    assert arguments[Q].array.any(axis=2).all(), "every query"
    written = arguments[KV].array.any(axis=(1, 2, 4))  # [blocks, slots]
    assert [True, True, True, False] == written[0, :4].tolist()
