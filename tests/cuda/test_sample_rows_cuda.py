"""The CUDA op SampleRows over kernels in numpy: what it launches, with which data, and what it refuses."""

import ctypes
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from graphs.op_twins_rows import sample_rows
from graphs.ops import library_path
from service.executor.config import MAX_NUM_SEQS
from service.executor.cuda.launch import BFLOAT16, CudaOps, CudaStep
from tests.cuda.numpy_kernels import NumpyKernels
from tests.cuda.sampling_rows import sample_workspace
from tests.unit.op_session import OpSession

MAX_TOP = 3


@pytest.fixture(scope="module")
def ops() -> Iterator[CudaOps]:
    ops = CudaOps(ctypes.CDLL(str(library_path())))
    yield ops
    ops.use(None)


class SampleCase:
    """Rows of random logits with a step's buffers, all of them on the host."""

    def __init__(self, num_rows: int, vocab_size: int = 97, kernels: object | None = None) -> None:
        rng = np.random.default_rng(4)
        self.kernels = kernels or NumpyKernels(64, 16)
        self.inputs = [
            (3 * rng.standard_normal((num_rows, vocab_size))).astype(np.float16),
            np.resize(np.array([0.0, 0.8, 1.5], np.float32), num_rows),
            np.resize(np.array([0, 20], np.int32), num_rows),
            np.full(num_rows, 0.9, np.float32),
            np.zeros(num_rows, np.float32),
            np.arange(num_rows, dtype=np.int64) - 1,
            np.arange(num_rows, dtype=np.int32) + 5,
        ]
        self.buffers = {
            "penalties": np.zeros((num_rows, 3), np.float32),
            "edit_indptr": np.zeros(num_rows + 1, np.int32),
            "edit_tokens": np.zeros(8, np.int32),
            "edit_counts": np.full(8, -1, np.int32),
            "edit_biases": np.zeros(8, np.float32),
            "edit_logits": np.full(8, np.nan, np.float32),
            "num_logprobs": np.full(num_rows, -1, np.int32),
            "logprob": np.full(num_rows, np.nan, np.float32),
            "top_tokens": np.full((num_rows, MAX_TOP), -7, np.int32),
            "top_logprobs": np.full((num_rows, MAX_TOP), np.nan, np.float32),
            # Numpy's kernels need none.
            "sample_workspace": sample_workspace(num_rows if kernels else 0, vocab_size, MAX_TOP),
        }
        self.step = CudaStep.of(self.kernels.launch_address, self.kernels.kernels)
        self.step.max_top = MAX_TOP
        for name, array in self.buffers.items():
            setattr(self.step, name, array.ctypes.data)

    def run(self, ops: CudaOps, *, has_step: bool = True) -> list[int]:
        ops.use(self.step if has_step else None)
        session = OpSession("SampleRows", self.inputs, 1, (TensorProto.INT32,), domain="chairlift.simulated")
        return session.run(self.inputs)[0].tolist()


def test_tokens_are_the_twins_in_three_launches(ops) -> None:
    """A block a row and 8 logits a thread, of which the numpy kernels have 128; then one a row."""
    case = SampleCase(7, vocab_size=2049)
    case.step.sample_blocks = 21
    expected = sample_rows(case.inputs[0].astype(np.float32), *case.inputs[1:])
    assert expected.tolist() == case.run(ops)
    grids = [(launch.name, launch.grid) for launch in case.kernels.take_log()]
    assert [("sample_scan", (7, 3, 1)), ("sample_count", (7, 3, 1)), ("sample_draw", (7, 1, 1))] == grids


@pytest.mark.parametrize(
    # 17 slices a row. By hand: ceil(rows * 17 / blocks) slices a block, at most 4.
    ("num_rows", "num_blocks", "expected"),
    [(1, 17, 17), (1, 16, 9), (2, 12, 6), (2, 10, 5), (3, 1, 5), (2, 0, 5)],
)
def test_a_block_takes_more_slices_of_a_row_where_there_are_many_rows(ops, num_rows, num_blocks, expected) -> None:
    case = SampleCase(num_rows, vocab_size=16 * 1024 + 1)
    case.step.sample_blocks = num_blocks
    case.run(ops)
    assert [(num_rows, expected, 1)] * 2 + [(num_rows, 1, 1)] == [launch.grid for launch in case.kernels.take_log()]


def test_as_many_rows_as_a_step_may_have_are_within_the_limits_of_a_grid(ops) -> None:
    """CUDA's: 2^31 - 1 blocks in x, and 65,535 in y."""
    case = SampleCase(MAX_NUM_SEQS, vocab_size=5)
    case.step.sample_draw = case.step.sample_scan  # which does nothing here: only grids matter
    case.run(ops)
    assert [(65_536, 1, 1)] * 3 == [launch.grid for launch in case.kernels.take_log()]


def test_edits_and_log_probabilities_go_by_the_steps_buffers(ops) -> None:
    """Row 1 must take token 40, and says how likely that was before; its likeliest tokens are the model's own."""
    case = SampleCase(3)
    case.buffers["edit_indptr"][:] = [0, 0, 1, 1]
    case.buffers["edit_tokens"][0], case.buffers["edit_biases"][0] = 40, 100.0
    case.buffers["num_logprobs"][1] = 2
    logits = case.inputs[0].astype(np.float64)[1]
    logprobs = logits - np.log(np.exp(logits).sum())
    assert 40 == case.run(ops)[1]
    assert case.buffers["logprob"][1] == pytest.approx(logprobs[40], abs=1e-5)
    assert [*np.argsort(-logprobs)[:2].tolist(), -7] == case.buffers["top_tokens"][1].tolist()
    assert np.isnan(case.buffers["logprob"][[0, 2]]).all()


def test_a_step_that_samples_nothing_launches_nothing(ops) -> None:
    case = SampleCase(0)
    assert [] == case.run(ops)
    assert [] == list(case.kernels.take_log())


def refused(case: SampleCase, ops: CudaOps, message: str, *, has_step: bool = True) -> None:
    with pytest.raises(Exception, match=message):
        case.run(ops, has_step=has_step)


def test_what_cannot_be_launched_is_refused(ops) -> None:
    case = SampleCase(2)
    refused(case, ops, "SampleRows: no CUDA kernels were given", has_step=False)
    case.step.sample_count.function = 99
    refused(case, ops, "sample_count cannot be launched: CUDA error 400")
    case.step.scalar_type = BFLOAT16
    refused(case, ops, "compiled for bfloat16, the logits are float16")


def test_shapes_that_do_not_belong_together_are_refused(ops) -> None:
    case = SampleCase(2)
    case.inputs[4] = np.zeros(3, np.float32)
    refused(case, ops, r"'min_p' has shape \[3\], expected \[2\]")
    refused(SampleCase(2, vocab_size=0), ops, "'logits' has 0 columns")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(ml_dtypes.bfloat16, "NOT_IMPLEMENTED.*SampleRows"), (np.float64, "INVALID_GRAPH.*Type Error")],
)
def test_the_op_is_registered_for_the_cuda_provider_alone(dtype: type, message: str) -> None:
    """bfloat16 is a type it knows, for which the CPU provider has no kernel; float64 is none."""
    inputs = SampleCase(2).inputs
    inputs[0] = inputs[0].astype(dtype)
    with pytest.raises(Exception, match=message):
        OpSession("SampleRows", inputs, 1, (TensorProto.INT32,))
