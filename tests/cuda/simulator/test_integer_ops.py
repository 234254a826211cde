"""Integer instructions against Python's own integers."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.cuda.simulator.conftest import RunKernel

EDGES_32 = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]
EDGES_64 = [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def words(seed: int, bits: int = 32) -> np.ndarray:
    """Edges, then random words: 256 in all."""
    edges = EDGES_32 if bits == 32 else EDGES_64
    rest = (
        np.random.default_rng(seed).integers(0, 1 << bits, 256 - len(edges), np.uint64, endpoint=False)
        if bits < 64
        else np.random.default_rng(seed).integers(0, (1 << 64) - 1, 256 - len(edges), np.uint64, endpoint=True)
    )
    both = np.array([*edges, *rest.tolist()], np.uint64)
    return np.random.default_rng(seed + 100).permutation(both).astype(np.uint32 if bits == 32 else np.uint64)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def s32(value: int) -> int:
    return signed(value, 32)


def s64(value: int) -> int:
    return signed(value, 64)


def truncated(a: int, b: int) -> int:
    """Division towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def agree(expected: list[int], actual: np.ndarray, bits: int) -> None:
    assert [value & ((1 << bits) - 1) for value in expected] == actual.tolist()


@pytest.mark.parametrize(
    ("name", "bits", "expected"),
    [
        ("mul_lo_s32", 32, lambda a, b: a * b),
        ("mul_hi_u32", 32, lambda a, b: a * b >> 32),
        ("mul_hi_s32", 32, lambda a, b: s32(a) * s32(b) >> 32),
        ("mul_wide_u32", 64, lambda a, b: a * b),
        ("mul_wide_s32", 64, lambda a, b: s32(a) * s32(b)),
        ("add_sat_s32", 32, lambda a, b: clamp(s32(a) + s32(b), -(1 << 31), (1 << 31) - 1)),
        ("sub_sat_s32", 32, lambda a, b: clamp(s32(a) - s32(b), -(1 << 31), (1 << 31) - 1)),
        ("min_s32", 32, lambda a, b: min(s32(a), s32(b))),
        ("max_u32", 32, max),
        ("shl_b32", 32, lambda a, b: a << b if b < 32 else 0),
        ("shr_u32", 32, lambda a, b: a >> min(b, 32)),
        ("shr_s32", 32, lambda a, b: s32(a) >> min(b, 32)),
        ("setp_lo_u32", 32, lambda a, b: a < b),
        ("setp_lt_s32", 32, lambda a, b: s32(a) < s32(b)),
        ("setp_two_results", 32, lambda a, b: (1 if a < b else 2) if b < 100 else 0),
        ("guarded", 32, lambda a, b: 1 if a > b else 9),
    ],
)  # fmt: skip
def test_instruction_of_two_words(
    register_op: RunKernel, name: str, bits: int, expected: Callable[[int, int], int]
) -> None:
    a, b = words(1), words(2)
    if name.startswith("sh"):
        b = np.where(np.arange(256) % 2 == 0, b % 40, b).astype(np.uint32)
    actual = register_op(name, np.uint32 if bits == 32 else np.uint64, a, b)
    agree([int(expected(x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)], actual, bits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mul_hi_u64", lambda a, b: a * b >> 64),
        ("mul_hi_s64", lambda a, b: s64(a) * s64(b) >> 64),
        ("add_through_carry", lambda a, b: a + b),
        ("sub_through_carry", lambda a, b: a - b),
        ("selp_b64", max),
    ],
)
def test_instruction_of_two_long_words(register_op: RunKernel, name: str, expected: Callable[[int, int], int]) -> None:
    a, b = words(3, 64), words(4, 64)
    agree([expected(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)], register_op(name, np.uint64, a, b), 64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("div_s32", truncated), ("rem_s32", lambda a, b: a - truncated(a, b) * b)],
)
def test_signed_division_rounds_towards_zero(
    register_op: RunKernel, name: str, expected: Callable[[int, int], int]
) -> None:
    a, b = words(5), words(6)
    b[b == 0] = 3
    actual = register_op(name, np.uint32, a, b)
    agree([expected(s32(x), s32(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)], actual, 32)


def test_unsigned_long_division(register_op: RunKernel) -> None:
    a, b = words(7, 64), np.maximum(words(8, 64) >> np.uint64(20), np.uint64(1))
    assert (a // b).tolist() == register_op("div_u64", np.uint64, a, b).tolist()
    assert (a % b).tolist() == register_op("rem_u64", np.uint64, a, b).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mad_lo_u32", lambda a, b, c: a * b + c),
        ("mad_hi_u32", lambda a, b, c: (a * b >> 32) + c),
        ("lop3_xor", lambda a, b, c: a ^ b ^ c),
        ("lop3_majority", lambda a, b, c: (a & b) | (b & c) | (a & c)),
        ("lop3_select", lambda a, b, c: (a & b) | (~a & c)),
        ("shf_l_wrap", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
        ("shf_r_wrap", lambda a, b, c: (b << 32 | a) >> (c & 31)),
        ("shf_r_clamp", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ],
)
def test_instruction_of_three_words(
    register_op: RunKernel, name: str, expected: Callable[[int, int, int], int]
) -> None:
    a, b, c = words(9), words(10), words(11)
    if name.startswith("shf"):
        c = np.where(np.arange(256) % 2 == 0, c % 40, c).astype(np.uint32)
    actual = register_op(name, np.uint32, a, b, c)
    agree([expected(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], actual, 32)


def test_wide_product_with_a_long_sum(register_op: RunKernel) -> None:
    a, b, c = words(12), words(13), words(14, 64)
    actual = register_op("mad_wide_u32", np.uint64, a, b, c)
    agree([x * y + z for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], actual, 64)


def field(value: int, position: int, length: int) -> int:
    return value >> position & ((1 << length) - 1)


def test_bit_fields_are_cut_out_and_put_in(register_op: RunKernel) -> None:
    a = words(15)
    position = np.random.default_rng(16).integers(0, 40, 256).astype(np.uint32)
    length = np.random.default_rng(17).integers(0, 40, 256).astype(np.uint32)
    rows = list(zip(a.tolist(), position.tolist(), length.tolist(), strict=True))
    agree([field(x, p, n) for x, p, n in rows], register_op("bfe_u32", np.uint32, a, position, length), 32)
    # The sign is the field's highest bit, or the word's if the field reaches beyond it.
    agree(
        [signed(field(s32(x), p, n), n) if n else 0 for x, p, n in rows],
        register_op("bfe_s32", np.uint32, a, position, length),
        32,
    )
    masks = [((1 << n) - 1) << p & 0xFFFFFFFF for _, p, n in rows]
    agree(
        [(x & ~m) | (0xABCDEF12 << p & m) for (x, p, _), m in zip(rows, masks, strict=True)],
        register_op("bfi_b32", np.uint32, a, position, length),
        32,
    )


def test_prmt_picks_bytes_and_copies_signs(register_op: RunKernel) -> None:
    a, b, selector = words(18), words(19), words(20)

    def permuted(x: int, y: int, s: int) -> int:
        pool = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
        chosen = []
        for i in range(4):
            nibble = s >> 4 * i & 15
            byte = pool[nibble & 7]
            chosen.append((255 if byte >= 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(chosen), "little")

    actual = register_op("prmt_b32", np.uint32, a, b, selector)
    agree([permuted(*each) for each in zip(a.tolist(), b.tolist(), selector.tolist(), strict=True)], actual, 32)


def highest(value: int) -> int:
    return value.bit_length() - 1


@pytest.mark.parametrize(
    ("name", "bits", "expected"),
    [
        ("popc_b32", 32, lambda a: a.bit_count()),
        ("popc_b64", 64, lambda a: a.bit_count()),
        ("clz_b32", 32, lambda a: 32 - a.bit_length()),
        ("clz_b64", 64, lambda a: 64 - a.bit_length()),
        ("brev_b32", 32, lambda a: int(f"{a:032b}"[::-1], 2)),
        ("bfind_u32", 32, highest),
        ("bfind_s32", 32, lambda a: highest(a if s32(a) >= 0 else ~a & 0xFFFFFFFF)),
        ("bfind_shiftamt_u32", 32, lambda a: 31 - highest(a) if a else -1),
        ("not_b32", 32, lambda a: ~a),
        ("abs_s32", 32, lambda a: abs(s32(a))),
        ("neg_s32", 32, lambda a: -a),
        ("cvt_s32_s8", 32, lambda a: signed(a, 8)),
        ("cvt_u32_u16", 32, lambda a: a & 0xFFFF),
        ("cvt_sat_u8_s32", 32, lambda a: clamp(s32(a), 0, 255)),
        ("cvt_sat_s8_s32", 32, lambda a: clamp(s32(a), -128, 127)),
    ],
)
def test_instruction_of_one_word(register_op: RunKernel, name: str, bits: int, expected: Callable[[int], int]) -> None:
    a = words(21, bits)
    agree([expected(x) for x in a.tolist()], register_op(name, np.uint32, a), 32)


def test_narrow_registers(register_op: RunKernel) -> None:
    a, b = (words(seed).astype(np.uint16) for seed in (22, 23))
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    agree([x * y for x, y in pairs], register_op("mul_wide_u16", np.uint32, a, b), 32)
    agree([signed(x, 16) < signed(y, 16) for x, y in pairs], register_op("setp_lt_s16", np.uint32, a, b), 32)
    agree([max(x, y) for x, y in pairs], register_op("selp_b16", np.uint16, a, b), 16)


def test_signs_of_long_words(register_op: RunKernel) -> None:
    a, b = words(24, 64), words(25, 64)
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    agree([s64(x) < s64(y) for x, y in pairs], register_op("setp_lt_s64", np.uint32, a, b), 32)
    shift = (words(26) % 80).astype(np.uint32)
    shifted = register_op("shr_s64", np.uint64, a, shift)
    agree([s64(x) >> min(n, 64) for x, n in zip(a.tolist(), shift.tolist(), strict=True)], shifted, 64)
    agree([s32(x) for x in words(27).tolist()], register_op("cvt_s64_s32", np.uint64, words(27)), 64)
