"""Float instructions and conversions against numpy, ml_dtypes and exact fractions."""

from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.cuda.simulator.conftest import RunKernel

SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 65504.0, 448.0, 2.5, 3.5, -2.5]


def floats(seed: int, spread: float = 8.0) -> np.ndarray:
    """Special values, then normal ones over many binades: 256 in all."""
    rng = np.random.default_rng(seed)
    rest = rng.standard_normal(256 - len(SPECIAL)) * 2.0 ** rng.uniform(-spread, spread, 256 - len(SPECIAL))
    return rng.permutation(np.array([*SPECIAL, *rest])).astype(np.float32)


def same(expected: np.ndarray, actual: np.ndarray) -> None:
    """Equal bit for bit; one NaN is as good as another."""
    assert expected.dtype == actual.dtype
    bits = f"u{expected.dtype.itemsize}"
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(is_nan, np.isnan(actual))
    np.testing.assert_array_equal(expected.view(bits)[~is_nan], actual.view(bits)[~is_nan])


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add_f32", np.add),
        ("div_f32", np.divide),
        ("min_f32", np.fmin),
        ("max_nan_f32", np.maximum),
        ("copysign_f32", lambda a, b: np.copysign(b, a)),
        ("add_sat_f32", lambda a, b: np.where(np.isnan(a + b), np.float32(0), np.clip(a + b, 0, 1)) + np.float32(0)),
        ("selp_f32", lambda a, b: np.where(a > 0, a, b)),
    ],
)
def test_instruction_of_two_floats(
    register_op: RunKernel, name: str, expected: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    a, b = floats(1), floats(2)
    same(expected(a, b).astype(np.float32), register_op(name, np.float32, a, b))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("setp_lt_f32", lambda a, b: a < b),
        ("setp_ltu_f32", lambda a, b: ~(a >= b)),
        ("setp_ne_f32", lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
        ("setp_num_f32", lambda a, b: ~np.isnan(a) & ~np.isnan(b)),
    ],
)
def test_comparisons_know_nan(
    register_op: RunKernel, name: str, expected: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    a, b = floats(3), floats(4)
    b[::5] = a[::5]
    np.testing.assert_array_equal(expected(a, b), register_op(name, np.uint32, a, b).astype(bool))


def rounded(value: Fraction, towards: int) -> np.float32:
    """The float next to an exact value: below it (-1), above it (1), or towards zero (0)."""
    nearest = np.float32(float(value))
    if towards == 0:
        towards = -1 if value > 0 else 1
    if Fraction(float(nearest)) != value and (Fraction(float(nearest)) > value) == (towards < 0):
        nearest = np.nextafter(nearest, np.float32(towards * np.inf), dtype=np.float32)
    return nearest


@pytest.mark.parametrize(
    ("name", "towards", "exact"),
    [
        ("add_rz_f32", 0, lambda a, b, c: a + b),
        ("add_rp_f32", 1, lambda a, b, c: a + b),
        ("mul_rm_f32", -1, lambda a, b, c: a * b),
        ("fma_rm_f32", -1, lambda a, b, c: a * b + c),
    ],
)
def test_directed_rounding(
    register_op: RunKernel, name: str, towards: int, exact: Callable[[Fraction, Fraction, Fraction], Fraction]
) -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(64).astype(np.float32) for _ in range(3))
    inputs = [a, b, c] if name.startswith("fma") else [a, b]
    values = [tuple(Fraction(float(x)) for x in row) for row in zip(a, b, c, strict=True)]
    expected = np.array([rounded(exact(*row), towards) for row in values], np.float32)
    same(expected, register_op(name, np.float32, *inputs))


def test_fma_rounds_once(register_op: RunKernel) -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    c = (-(a.astype(np.float64) * b) * (1 + 1e-9)).astype(np.float32)
    exact = [
        float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    same(np.array(exact, np.float32), register_op("fma_f32", np.float32, a, b, c))
    wide = [each.astype(np.float64) for each in (a, b, c)]
    same(np.array(exact, np.float64), register_op("fma_f64", np.float64, *wide))


def test_ftz_makes_zeros_of_subnormals(register_op: RunKernel) -> None:
    a = np.array([1e-40, -1e-40, 1e-20, 2.0], np.float32)
    b = np.array([1e10, 1e10, 1e-20, 1.5e-38], np.float32)
    same(np.array([0.0, -0.0, 0.0, 3e-38], np.float32), register_op("mul_ftz_f32", np.float32, a, b))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ex2_f32", np.exp2),
        ("lg2_f32", lambda x: np.log2(np.abs(x))),
        ("sin_f32", np.sin),
        ("cos_f32", np.cos),
        ("tanh_f32", np.tanh),
        ("rcp_f32", np.reciprocal),
        ("sqrt_f32", lambda x: np.sqrt(np.abs(x))),
        ("rsqrt_f32", lambda x: 1 / np.sqrt(np.abs(x))),
    ],
)
def test_approximated_functions(
    register_op: RunKernel, name: str, expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = np.random.default_rng(7).uniform(-9, 9, 256).astype(np.float32)
    if name in ("lg2_f32", "sqrt_f32", "rsqrt_f32"):
        x = np.abs(x)
    np.testing.assert_allclose(register_op(name, np.float32, x), expected(x.astype(np.float64)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "dtype"), [("cvt_f16_f32", np.float16), ("cvt_bf16_f32", ml_dtypes.bfloat16)])
def test_rounding_to_16_bits(register_op: RunKernel, name: str, dtype: type) -> None:
    x = floats(8, spread=20)
    # Ties, which go to the even neighbour.
    x[:64] = (np.arange(64) * 2 + 1) / 2 * np.float32(2.0**-7 if dtype is ml_dtypes.bfloat16 else 2.0**-10) + 1
    same(x.astype(dtype), register_op(name, np.uint16, x).view(dtype))


@pytest.mark.parametrize(("name", "dtype"), [("cvt_f32_f16", np.float16), ("cvt_f32_bf16", ml_dtypes.bfloat16)])
def test_every_16_bit_float_widens_exactly(register_op: RunKernel, name: str, dtype: type) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    same(every.view(dtype).astype(np.float32), register_op(name, np.float32, every))


@pytest.mark.parametrize(("name", "dtype"), [("cvt_f16x2_f32", np.float16), ("cvt_bf16x2_f32", ml_dtypes.bfloat16)])
def test_the_first_of_two_floats_becomes_the_upper_half(register_op: RunKernel, name: str, dtype: type) -> None:
    high, low = floats(9), floats(10)
    pairs = register_op(name, np.uint32, high, low).view(np.uint16).reshape(-1, 2)
    same(low.astype(dtype), pairs[:, 0].copy().view(dtype))
    same(high.astype(dtype), pairs[:, 1].copy().view(dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [("cvt_e4m3x2_f32", ml_dtypes.float8_e4m3fn, 448), ("cvt_e5m2x2_f32", ml_dtypes.float8_e5m2, 57344)],
)
def test_8_bit_floats_saturate_and_round_to_even(
    register_op: RunKernel, name: str, dtype: type, largest: float
) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    ties = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([floats(11), floats(12, 12), finite, ties, [np.float32(largest * 1.1), np.float32(1e30)]])
    x = np.resize(x, 1024).astype(np.float32)
    expected: np.ndarray = np.where(np.isnan(x), x, np.clip(x, -largest, largest)).astype(dtype)
    pairs = register_op(name, np.uint16, x, x[::-1].copy()).view(np.uint8).reshape(-1, 2)
    same(expected, pairs[:, 1].copy().view(dtype))
    same(expected[::-1].copy(), pairs[:, 0].copy().view(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("cvt_f16x2_e4m3x2", ml_dtypes.float8_e4m3fn), ("cvt_f16x2_e5m2x2", ml_dtypes.float8_e5m2)],
)
def test_every_8_bit_float_widens_exactly(register_op: RunKernel, name: str, dtype: type) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    halves = register_op(name, np.uint32, every).view(np.float16)
    same(every.view(np.uint8).view(dtype).astype(np.float16), halves)


@pytest.mark.parametrize(
    ("name", "dtype", "rounding"),
    [
        ("cvt_rzi_s32_f32", np.int32, np.trunc),
        ("cvt_rni_s32_f32", np.int32, np.rint),
        ("cvt_rpi_u32_f32", np.uint32, np.ceil),
        ("cvt_rzi_u64_f32", np.uint64, np.trunc),
    ],
)
def test_integers_from_floats_are_clamped(
    register_op: RunKernel, name: str, dtype: type[np.integer], rounding: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = floats(13, spread=40)
    bounds = np.iinfo(dtype)
    whole = [0 if np.isnan(v) else v if np.isinf(v) else int(v) for v in rounding(x.astype(np.float64)).tolist()]
    expected = np.array([int(max(bounds.min, min(bounds.max, v))) for v in whole], dtype)
    np.testing.assert_array_equal(expected, register_op(name, dtype, x))


def test_other_conversions(register_op: RunKernel) -> None:
    x = floats(14)
    same(np.floor(x), register_op("cvt_rmi_f32_f32", np.float32, x))
    same(np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(np.float32) + np.float32(0),
         register_op("cvt_sat_f32_f32", np.float32, x))  # fmt: skip
    same(x.astype(np.float64), register_op("cvt_f64_f32", np.float64, x))
    wide = np.random.default_rng(15).standard_normal(64) * 1e5
    same(wide.astype(np.float32), register_op("cvt_rn_f32_f64", np.float32, wide))
    words = np.random.default_rng(16).integers(0, 1 << 64, 64, np.uint64)
    same(words.astype(np.float32), register_op("cvt_rn_f32_u64", np.float32, words))
    numbers = np.random.default_rng(17).integers(-100_000, 100_000, 64).astype(np.int32)
    same(numbers.astype(np.float32), register_op("cvt_rn_f32_s32", np.float32, numbers))
    same(numbers.astype(np.float16), register_op("cvt_rn_f16_s32", np.uint16, numbers).view(np.float16))


def test_arithmetic_on_pairs_of_narrow_floats(register_op: RunKernel) -> None:
    rng = np.random.default_rng(18)
    a, b = (rng.standard_normal(256).astype(np.float16) for _ in range(2))
    same(a + b, register_op("add_f16x2", np.uint32, a.view(np.uint32), b.view(np.uint32)).view(np.float16))
    same(a * b, register_op("mul_f16", np.uint16, a.view(np.uint16), b.view(np.uint16)).view(np.float16))
    x, y, z = (rng.standard_normal(256).astype(ml_dtypes.bfloat16) for _ in range(3))
    exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    actual = register_op("fma_bf16x2", np.uint32, *(each.view(np.uint32) for each in (x, y, z)))
    same(exact.astype(np.float32).astype(ml_dtypes.bfloat16), actual.view(ml_dtypes.bfloat16))
