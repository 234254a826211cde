"""The launches that the GPU check times compute attention: on the simulator, against its definition."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from service.executor.cuda.kernels import DEFAULT_SHARED_BYTES, kernel_specs, source_folder
from service.executor.cuda.launch import LoadedKernel
from tests.cuda.attention_problem import Arrays, Problem, expected_attention
from tests.cuda.attention_runs import LIMIT
from tests.cuda.gpu_check_speed import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Decode
from tests.cuda.kernel_builds import MACROS, MAX_SHARED_BYTES
from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimDevice

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

CONTEXT = 512


class SimGpu(SimDevice):
    """What `Decode` uses of a GPU: three multiprocessors that hold eight blocks each."""

    def __init__(self):
        super().__init__(seed=2)
        self.modules = SimpleNamespace(max_shared_bytes=MAX_SHARED_BYTES["sm_90"])
        self.driver = SimpleNamespace(
            num_sms=3,
            blocks_per_sm=lambda _kernel: 8,
            allocate=self.allocate,
            copy_in=self.copy_in,
            copy_within=ctypes.memmove,
            wait=lambda: None,
        )

    def kernels(self, config):
        loaded = {}
        for spec in kernel_specs(config):
            options = tuple(f"-D{each}" for each in config.definitions if each.split("=")[0] in MACROS[spec.source])
            function = self.load(source_folder() / spec.source, options).kernel(spec.name)
            if spec.shared_bytes > DEFAULT_SHARED_BYTES:
                self.set_max_shared_bytes(function, spec.shared_bytes)
            loaded[spec.name] = LoadedKernel(function, spec.block_threads, spec.shared_bytes)
        return loaded


@pytest.mark.parametrize("batch", [1, 4])
def test_timed_launches_compute_attention_in_every_pool(batch):
    gpu = SimGpu()
    num_pools, columns = 2, CONTEXT // BLOCK_SIZE
    decode = Decode(gpu, batch, CONTEXT, num_pools)
    assert decode.num_partials > 0, "some sequence is cut, so that the results are merged too"
    problem = Problem(
        (CONTEXT,) * batch, (1,) * batch, NUM_HEADS // NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    bf16 = ml_dtypes.bfloat16
    kv_shape = (num_pools * batch * columns, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    for call in range(num_pools):
        decode(call)
        assert decode.is_output_finite()
        q, kv, table = (each.value for each in decode.decode_arguments[call][:3])
        arrays = Arrays(
            gpu.download(q, decode.out.shape, np.uint16).view(bf16),
            gpu.download(kv, kv_shape, np.uint16).view(bf16),
            gpu.download(table, (batch, columns), np.int32),
        )
        expected = expected_attention(problem, arrays)
        distance = np.linalg.norm(decode.out.view(bf16).astype(np.float64) - expected)
        assert distance < LIMIT["bf16"] * np.linalg.norm(expected)
    decode.close()


def test_an_output_that_was_not_written_is_seen():
    decode = Decode(SimGpu(), 1, CONTEXT, 1)
    assert not decode.is_output_finite()
    decode.close()
