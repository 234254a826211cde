"""The CUDA op against the op's definition, with kernels in numpy: what is launched, on which grid, with which data."""

import ctypes
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from graphs.op_twins_attention import AttentionSpec, paged_attention
from graphs.ops import library_path
from service.errors import ExecutorError
from service.executor.cuda.attention_plan import AttentionPlanner
from service.executor.cuda.launch import CudaOps, CudaStep
from service.executor.cuda.plan_layout import PlanLayout, PlanLimits
from tests.cuda.numpy_kernels import NumpyKernels
from tests.unit.attention_cases import RAGGED, AttentionCase, make_case
from tests.unit.op_session import OpSession

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64)
HEADER = Path(__file__).resolve().parents[2] / "graphs" / "ops" / "cuda_launch.h"
DECODES = [(1, 1), (1, 63), (1, 64), (0, 0), (1, 65), (1, 129), (3, 130), (1, 513), (1, 700)]
TURNS = [(1, 1050), (30, 1500), (20, 600)]  # the second one's items are cut


@pytest.fixture(scope="module")
def ops() -> Iterator[CudaOps]:
    ops = CudaOps(ctypes.CDLL(str(library_path())))
    yield ops
    ops.use(None)


class CudaCase:
    """A case with a plan and a workspace."""

    def __init__(self, case: AttentionCase, kernels: NumpyKernels, **options: object) -> None:
        self.case, spec = case, case.spec
        num_seqs = len(case.batch.context_lens)
        self.limits = PlanLimits(
            num_ranges=5,
            group_size=spec.num_heads // spec.num_kv_heads,
            max_seqs=num_seqs,
            max_tokens=len(case.qkv),
            max_context=int(case.batch.context_lens.max()),
            sliding_window=spec.sliding_window,
            tile_tokens=kernels.kernels.tile_tokens,
            prefill_rows=kernels.kernels.prefill_rows,
            resident_prefill_blocks=4,
            **options,
        )
        layout = PlanLayout.of(self.limits, has_prefill=True)
        self.plan = np.zeros(layout.size, np.int32)
        planner = AttentionPlanner(self.limits, layout, self.plan)
        self.counts = planner.fill(case.batch.cu_seqlens, case.batch.context_lens)
        self.step = CudaStep.of(kernels.launch_address, kernels.kernels)
        for name, section in planner.sections._asdict().items():
            setattr(self.step, name, section.ctypes.data)
        self.step.num_ranges = self.limits.num_ranges if self.counts.num_decode_items else 0
        self.step.prefill_blocks, self.step.merge_blocks = self.counts.num_prefill_items, self.counts.num_merges
        self.step.num_slots = self.limits.max_slots
        num_floats = self.limits.max_slots * spec.num_kv_heads * 16 * (spec.head_dim + 1)
        self.inputs = case.inputs() | {
            "qkv": case.qkv.astype(np.float16),
            "workspace": np.full(num_floats, np.nan, np.float32),
        }

    def run(self, ops: CudaOps) -> np.ndarray:
        ops.use(self.step)
        spec = self.case.spec
        attributes = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
        arrays = list(self.inputs.values())
        session = OpSession(
            "PagedAttention", arrays, 1, (TensorProto.FLOAT16,), domain="chairlift.simulated", **attributes
        )
        return session.run(arrays)[0]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and KV buffer by definition."""
        cache = self.case.kv_cache.copy()
        qkv = self.inputs["qkv"].astype(np.float32)
        return paged_attention(self.case.spec, qkv, cache, self.case.batch, self.case.tables), cache


def close(kernels: NumpyKernels, expected: tuple[np.ndarray, np.ndarray], out: np.ndarray, cache: np.ndarray) -> None:
    assert kernels.errors == []
    assert np.abs(expected[0] - out.astype(np.float64)).max() < 4e-3
    assert np.nanmax(np.abs(expected[1] - cache.astype(np.float32))) < 2e-3
    assert np.array_equal(np.isnan(expected[1]), np.isnan(cache))


@pytest.mark.parametrize("lengths", [RAGGED, DECODES, TURNS], ids=["ragged", "decode", "turns"])
@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, sliding_window=70, softcap=3.0), replace(SPEC, num_heads=16, scale=0.2)],
    ids=["plain", "window and soft cap", "groups of 8"],
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_it_computes_what_the_op_is_defined_to(ops, lengths, spec, is_deterministic: bool) -> None:
    kernels = NumpyKernels(spec.head_dim, block_size=16)
    case = CudaCase(make_case(spec, lengths, np.float16), kernels, is_deterministic=is_deterministic)
    expected = case.expected()
    close(kernels, expected, case.run(ops), case.case.kv_cache)
    assert case.counts.num_merges > 0


def test_norms_partial_rotation_and_other_blocks_and_tiles(ops) -> None:
    kernels = NumpyKernels(SPEC.head_dim, block_size=32, tile_tokens=32)
    case = make_case(SPEC, RAGGED, np.float16, block_size=32, rotary_dim=32, has_norms=True)
    cuda = CudaCase(case, kernels)
    expected = cuda.expected()
    close(kernels, expected, cuda.run(ops), case.kv_cache)


def test_a_step_launches_only_what_it_needs_on_the_grids_of_the_readme(ops) -> None:
    """6 + 2 * 2 heads, four a block, are three blocks a token; 11 sequences."""
    kernels = NumpyKernels(SPEC.head_dim, block_size=16)
    for lengths, expected in (
        # 1, 1, 1, 2, 3, 3, 9, 11 tiles in 5 ranges of 7 are cut in the sixth, seventh and eighth sequence.
        (DECODES, [("rope_kv_write", (10, 3, 1)), ("attn_decode", (5, 2, 1)), ("attn_combine", (3, 2, 1))]),
        ([(40, 40), (30, 90)], [("rope_kv_write", (70, 3, 1)), ("attn_prefill", (2, 4, 1))]),
        ([(1, 5), (40, 40)], [("rope_kv_write", (41, 3, 1)), ("attn_decode", (5, 2, 1)), ("attn_prefill", (2, 2, 1))]),
        # 64 and 26 rows of 24 tiles each are cut in two, for 4 blocks; they are merged by 16 rows.
        ([(30, 1500)], [("rope_kv_write", (30, 3, 1)), ("attn_prefill", (2, 4, 1)), ("attn_combine", (6, 2, 1))]),
    ):
        CudaCase(make_case(SPEC, lengths, np.float16), kernels).run(ops)
        launches = list(kernels.take_log())
        assert expected == [(launch.name, launch.grid) for launch in launches]
        for launch in launches:
            loaded = getattr(kernels.kernels, launch.name)
            assert ((loaded.block_threads, 1, 1), loaded.shared_bytes) == (launch.block, launch.shared_bytes)


def test_steps_of_one_batch_size_differ_in_data_alone(ops) -> None:
    """What a CUDA graph needs: other lengths, blocks and slots, yet the same launches byte for byte."""
    kernels = NumpyKernels(SPEC.head_dim, block_size=16)
    case = CudaCase(make_case(SPEC, [(1, 700), (1, 64), (1, 129)], np.float16), kernels)
    case.run(ops)
    first = list(kernels.take_log())
    other = CudaCase(make_case(SPEC, [(1, 3), (1, 650), (1, 66)], np.float16, seed=1), kernels)
    batch = case.case.batch
    for mine, its in (
        (case.case.kv_cache, other.case.kv_cache),
        (case.inputs["qkv"], other.inputs["qkv"]),
        (batch.context_lens, other.case.batch.context_lens),
        (batch.slot_mapping, other.case.batch.slot_mapping),
        (batch.positions, other.case.batch.positions),
        (batch.block_table, other.case.batch.block_table),
        (case.plan, other.plan),
    ):
        columns = [slice(0, min(pair)) for pair in zip(mine.shape, its.shape, strict=True)]
        mine[tuple(columns)] = its[tuple(columns)]
    expected = other.expected()
    outs = case.run(ops)
    close(kernels, expected, outs, case.case.kv_cache[: len(other.case.kv_cache)])
    again = list(kernels.take_log())
    # ONNX Runtime places q and out, which here are not bound, where it likes.
    assert [launch[:4] for launch in first] == [launch[:4] for launch in again]


def refused(ops: CudaOps, case: CudaCase, message: str) -> None:
    with pytest.raises(Exception, match=message):
        case.run(ops)


def test_kernels_for_another_model_are_refused(ops) -> None:
    kernels = NumpyKernels(SPEC.head_dim, block_size=16)
    case = CudaCase(make_case(SPEC, [(1, 5)], np.float16), kernels)
    case.step.head_dim = 128
    refused(ops, case, "compiled for float16 and head_dim 128, the graph has float16 and 64")
    case.step.head_dim, case.step.block_size = 64, 32
    refused(ops, case, "'kv_cache' has shape .* expected .*any, 2, 2, 32, 64")
    case.step.block_size, case.step.num_slots, case.step.merge_blocks = 16, 1000, 1
    refused(ops, case, "'workspace' has 87360 elements, 1000 partial results take 2080000")


def test_without_kernels_or_after_a_failed_launch_the_op_fails(ops) -> None:
    kernels = NumpyKernels(SPEC.head_dim, block_size=16)
    case = CudaCase(make_case(SPEC, [(1, 5)], np.float16), kernels)
    case.step.rope_kv_write.function = 99
    refused(ops, case, "rope_kv_write cannot be launched: CUDA error 400")
    case.step = None
    refused(ops, case, "no CUDA kernels were given")


@pytest.mark.parametrize("name", ["struct_bytes", "layout"])
def test_a_structure_of_another_size_or_layout_is_refused(ops, name: str) -> None:
    kernels = NumpyKernels(SPEC.head_dim, block_size=16)
    step = CudaStep.of(kernels.launch_address, kernels.kernels)
    setattr(step, name, getattr(step, name) - 8)
    with pytest.raises(ExecutorError, match="built from other sources"):
        ops.use(step)


def test_the_layouts_number_is_that_of_the_headers_fields() -> None:
    """The library compares it with the one that Python's fields make."""
    sizes = {"uint32_t": 4, "int32_t": 4, "CudaLaunch": 8, "CudaKernel": 16}
    text = HEADER.read_text()
    fields = []
    for struct in ("CudaKernel", "CudaStep"):
        for line in text.split(f"struct {struct} {{\n")[1].split("\n};")[0].split("\n"):
            if not line.strip().startswith("//"):
                kind, name = re.match(r" *(?:const )?(\w+\*?) (\w+);", line).groups()
                fields.append(f"{name} {8 if kind.endswith('*') else sizes[kind]}")
    number = zlib.crc32("\n".join(fields).encode())
    assert f"kCudaStepLayout = {number:#x};" in text


def test_the_op_is_registered_for_the_cuda_provider_alone() -> None:
    """bfloat16 is a type it knows, for which the CPU provider has no kernel; float64 is none."""
    case = CudaCase(make_case(SPEC, [(1, 5)], np.float16), NumpyKernels(SPEC.head_dim, block_size=16))
    attributes = {name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__}
    for dtype, kind, message in (
        (ml_dtypes.bfloat16, TensorProto.BFLOAT16, "NOT_IMPLEMENTED.*PagedAttention"),
        (np.float64, TensorProto.DOUBLE, "INVALID_GRAPH.*Type Error"),
    ):
        arrays = [case.inputs["qkv"].astype(dtype), *list(case.inputs.values())[1:]]
        with pytest.raises(Exception, match=message):
            OpSession("PagedAttention", arrays, 1, (kind,), **attributes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, "'head_dim' is 0, expected a multiple of 8 up to 256"),
        ({"head_dim": 60}, "'head_dim' is 60, expected a multiple of 8 up to 256"),
        ({"head_dim": 264}, "'head_dim' is 264, expected a multiple of 8 up to 256"),
        ({"num_heads": 65537, "num_kv_heads": 65537}, "'num_heads' 65537 is more than 65536"),
        ({"num_heads": 34, "num_kv_heads": 2}, "'num_heads' 34 must be 1 to 16 times 'num_kv_heads' 2"),
    ],
)
def test_attributes_beyond_the_kernels_are_refused(ops, changes: dict[str, int], message: str) -> None:
    case = CudaCase(make_case(SPEC, [(1, 5)], np.float16), NumpyKernels(SPEC.head_dim, block_size=16))
    case.case = replace(case.case, spec=replace(SPEC, **changes))
    refused(ops, case, message)
