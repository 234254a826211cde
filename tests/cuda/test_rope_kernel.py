"""Rotation and KV write on the simulator against the op's twin."""

import numpy as np
import pytest

from graphs.op_twins_attention import AttentionSpec, HeadTables, split_heads
from service.executor.cuda.kernels import KernelConfig, Scalar
from tests.cuda.attention_problem import E4M3, SCALARS
from tests.cuda.sim_kernels import Out, SimKernels
from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimDevice

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

ULP = {"bf16": 2.0**-8, "half": 2.0**-11}  # half a unit in the last place, relative
NUM_TOKENS = 5
SLOTS = np.array([33, 0, -1, 17, 47], np.int32)
POSITIONS = np.array([40, 0, 3, 9, 63], np.int32)


class RopeCase:
    def __init__(
        self,
        spec,
        scalar,
        *,
        block_size=16,
        rotary_half=None,
        has_norms=False,
        is_fp8=False,
        scales=(1.0, 1.0),
        device=None,
    ):
        rng = np.random.default_rng(4)
        half = spec.head_dim // 2 if rotary_half is None else rotary_half
        angles = rng.uniform(0, 6, (64, half))
        norms = rng.uniform(0.5, 1.5, (2, spec.head_dim)).astype(np.float32) if has_norms else (None, None)
        self.spec, self.scales = spec, scales
        self.tables = HeadTables(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), *norms)
        shape = (NUM_TOKENS, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self.qkv = (3 * rng.standard_normal(shape)).astype(np.float32).astype(SCALARS[scalar])
        self.q = np.full((NUM_TOKENS, spec.num_heads, spec.head_dim), np.nan, SCALARS[scalar])
        kv_shape = (3 * 16 // block_size + 1, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.kv = np.full(kv_shape, 7.0, np.float32).astype(E4M3 if is_fp8 else SCALARS[scalar])
        config = KernelConfig(Scalar(scalar), spec.head_dim, block_size, 32, Scalar(scalar), is_fp8)
        self.kernels = SimKernels(config, device or SimDevice(seed=2))

    def run(self):
        spec, tables = self.spec, self.tables
        grid = (NUM_TOKENS, -(-(spec.num_heads + 2 * spec.num_kv_heads) // 4))
        sizes = (spec.num_heads, spec.num_kv_heads, tables.cos.shape[1], spec.norm_epsilon, *self.scales)
        memory = (tables.cos, tables.sin, tables.q_norm, tables.k_norm, Out(self.q), Out(self.kv))
        self.kernels.launch("rope_kv_write", grid, self.qkv, POSITIONS, SLOTS, *memory, *sizes)

    def expected(self):
        """Queries, and the slots' keys and values as the model means them, in float64."""
        flat = self.qkv.astype(np.float32).reshape(NUM_TOKENS, -1)
        return split_heads(self.spec, flat, POSITIONS, self.tables)

    def stored(self, token, which):
        block, offset = divmod(int(SLOTS[token]), self.kv.shape[3])
        return self.kv[block, which, :, offset].astype(np.float64) * self.scales[which]

    def check_queries(self, scalar):
        expected = self.expected()[0]
        assert np.abs(self.q.astype(np.float64) - expected).max() <= 1.01 * ULP[scalar] * np.abs(expected).max()

    def written(self):
        return [token for token in range(NUM_TOKENS) if SLOTS[token] >= 0]


@pytest.mark.parametrize("scalar", ["bf16", "half"])
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {}),
        (64, {"has_norms": True, "block_size": 32}),
        (96, {"rotary_half": 16, "has_norms": True}),
        (128, {"rotary_half": 0}),
        (256, {"has_norms": True}),
    ],
)
def test_heads_are_the_twins(scalar, head_dim, options):
    case = RopeCase(AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=head_dim), scalar, **options)
    case.run()
    case.check_queries(scalar)
    _, keys, values = case.expected()
    for token in case.written():
        for which, heads in enumerate((keys[token], values[token])):
            assert np.allclose(case.stored(token, which), heads, rtol=1.01 * ULP[scalar], atol=2e-6)


def test_only_the_slots_of_the_step_are_written():
    case = RopeCase(AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=64), "half")
    case.run()
    untouched = np.ones(case.kv.shape, bool)
    for slot in SLOTS[SLOTS >= 0]:
        untouched[slot // 16, :, :, slot % 16] = False
    assert (case.kv[untouched] == 7.0).all()
    assert not (case.kv[~untouched] == 7.0).any()


def test_large_keys_and_values_saturate():
    case = RopeCase(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=64), "half", rotary_half=1)
    case.qkv[0, 1:] = 60_000.0
    case.tables.cos[POSITIONS[0]], case.tables.sin[POSITIONS[0]] = np.sqrt(0.5), np.sqrt(0.5)
    case.run()
    assert 65_504.0 == case.stored(0, 0)[0, 1]  # 60,000 * sqrt(2)
    assert np.isfinite(case.kv.astype(np.float32)).all()


@pytest.mark.parametrize(("scalar", "is_fp8"), [("bf16", False), ("half", False), ("half", True)])
def test_keys_and_values_that_are_no_numbers_stay_so(scalar, is_fp8):
    """Whoever reads them fails; finite ones would be served, from the prefix cache too."""
    case = RopeCase(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=64), scalar, rotary_half=0, is_fp8=is_fp8)
    case.qkv[0, 1:, 5] = np.nan
    case.qkv[1, 1:, 6] = -np.nan
    case.run()
    for which in (0, 1):
        assert [5] == np.flatnonzero(np.isnan(case.stored(0, which)[0])).tolist()
        assert [6] == np.flatnonzero(np.isnan(case.stored(1, which)[0])).tolist()


@pytest.mark.parametrize("scalar", ["bf16", "half"])
def test_e4m3_keys_and_values_are_rounded_to_the_nearest(scalar):
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64)
    case = RopeCase(spec, scalar, is_fp8=True, rotary_half=0, scales=(0.5, 0.25))
    # 64 values for each head: the whole range with its ends, ties, subnormal numbers and both zeros
    rng = np.random.default_rng(6)
    sizes = np.exp2(rng.uniform(-13, 9.5, case.qkv.shape)) * rng.choice([-1, 1], case.qkv.shape)
    sizes[..., :8] = [0.0, -0.0, 448 * 0.5, -1000.0, 2.0**-10, 1.5 * 2.0**-9, 0.0625 * 17 * 0.5, 0.0625 * 19 * 0.5]
    case.qkv[:] = sizes.astype(np.float32)
    case.run()
    for token in case.written():
        for which, scale in enumerate(case.scales):
            block, offset = divmod(int(SLOTS[token]), 16)
            heads = case.qkv[token, 2 + 2 * which : 4 + 2 * which].astype(np.float32) / np.float32(scale)
            expected = np.clip(heads, -448, 448).astype(E4M3)
            assert expected.tobytes() == np.ascontiguousarray(case.kv[block, which, :, offset]).tobytes()
