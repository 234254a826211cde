"""Operations of a warp against their definition, lane by lane."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.cudasim.device import SimDevice, SimModule

FULL = 0xFFFFFFFF
LANES = range(32)


@pytest.fixture
def run(device: SimDevice, load: Callable[[str], SimModule]) -> Callable[..., np.ndarray]:
    """Runs a kernel of warp_ops.cu on one block: `run(name, array or number..., shape=, dtype=)`."""

    def launch(
        name: str, *inputs: np.ndarray | int, shape: tuple[int, ...], dtype: type, threads: int = 32
    ) -> np.ndarray:
        out = device.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        arguments = [np.uint64(device.upload(x)) if isinstance(x, np.ndarray) else np.uint32(x) for x in inputs]
        kernel = load("warp_ops.cu").kernel(name)
        device.launch(kernel, (1, 1, 1), (threads, 1, 1), 0, [*arguments, np.uint64(out)])
        return device.download(out, shape, dtype)

    return launch


def clamp_of(width: int, mode: str) -> int:
    """The last operand that CUDA's shuffles give for a width: segment bits from bit 8 on, and the last lane."""
    return (32 - width) << 8 | (0 if mode == "up" else 31)


def source_lane(mode: str, lane: int, delta: int, width: int) -> int:
    """The lane that CUDA's definition of __shfl_*_sync reads; its own where that lies outside its segment."""
    first = lane // width * width
    if mode == "up":
        return lane - delta if lane - delta >= first else lane
    if mode == "down":
        return lane + delta if lane + delta < first + width else lane
    if mode == "bfly":
        return lane ^ delta if lane ^ delta < first + width else lane
    return first + delta % width


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles_within_segments(run: Callable[..., np.ndarray], mode: str, width: int) -> None:
    value = np.random.default_rng(1).integers(0, 1 << 32, 32).astype(np.uint32)
    for delta in (0, 1, 2, 5, 8, 16, 31):
        b, c = (np.full(32, x, np.uint32) for x in (delta, clamp_of(width, mode)))
        out = run(f"shfl_{mode}", value, b, c, FULL, shape=(32, 2), dtype=np.uint32)
        sources = [source_lane(mode, lane, delta, width) for lane in LANES]
        assert value[sources].tolist() == out[:, 0].tolist()
        own_lane_is_meant = [mode == "idx" or delta == 0 for _ in LANES]
        in_range = [source != lane or own for lane, source, own in zip(LANES, sources, own_lane_is_meant, strict=True)]
        assert in_range == out[:, 1].astype(bool).tolist()


def test_every_lane_chooses_its_own_source(run: Callable[..., np.ndarray]) -> None:
    value = np.arange(100, 132, dtype=np.uint32)
    sources = np.random.default_rng(2).integers(0, 32, 32).astype(np.uint32)
    out = run("shfl_idx", value, sources, np.full(32, 31, np.uint32), FULL, shape=(32, 2), dtype=np.uint32)
    assert (sources + 100).tolist() == out[:, 0].tolist()


def test_a_shuffle_among_some_lanes(run: Callable[..., np.ndarray]) -> None:
    value = np.arange(32, dtype=np.uint32)
    distance, clamp = np.full(32, 1, np.uint32), np.full(32, 31, np.uint32)
    out = run("shfl_bfly", value, distance, clamp, 0x0000FF00, shape=(32, 2), dtype=np.uint32)
    assert [lane ^ 1 if 8 <= lane < 16 else 0 for lane in LANES] == out[:, 0].tolist()


def fold(values: list[int], combine: Callable[[int, int], int]) -> int:
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


@pytest.mark.parametrize("mask", [FULL, 0x0F0F0F0F, 0x80000001])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vote_ballot", lambda mine, values: sum(1 << lane for lane, value in values.items() if value)),
        ("vote_all", lambda mine, values: all(values.values())),
        ("vote_any", lambda mine, values: any(values.values())),
        ("vote_uni", lambda mine, values: len({bool(value) for value in values.values()}) == 1),
        ("match_any", lambda mine, values: sum(1 << lane for lane, value in values.items() if value == mine)),
        ("match_all", lambda mine, values: sum(1 << x for x in values) if len(set(values.values())) == 1 else 77),
        ("redux_add", lambda mine, values: sum(values.values()) & FULL),
        ("redux_min_s32", lambda mine, values: min(values.values(), key=signed)),
        ("redux_max_u32", lambda mine, values: max(values.values())),
        ("redux_and", lambda mine, values: fold(list(values.values()), lambda a, b: a & b)),
        ("redux_xor", lambda mine, values: fold(list(values.values()), lambda a, b: a ^ b)),
    ],
)
def test_votes_matches_and_reductions(
    run: Callable[..., np.ndarray], name: str, expected: Callable[[int, dict[int, int]], int], mask: int
) -> None:
    rng = np.random.default_rng(3)
    cases = [
        np.zeros(32), np.full(32, 5), rng.integers(0, 2, 32), rng.integers(0, 3, 32), rng.integers(0, 1 << 32, 32)
    ]  # fmt: skip
    for value in (case.astype(np.uint32) for case in cases):
        out = run(name, value, mask, shape=(32,), dtype=np.uint32)
        voters = {lane: int(value[lane]) for lane in LANES if mask >> lane & 1}
        assert [int(expected(voters[x], voters)) if x in voters else 0 for x in LANES] == out.tolist()


def test_warps_of_a_block_vote_apart(run: Callable[..., np.ndarray]) -> None:
    value = (np.arange(96) >= 32).astype(np.uint32)
    assert [0] * 32 + [FULL] * 64 == run("vote_ballot", value, FULL, shape=(96,), dtype=np.uint32, threads=96).tolist()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_each_lane_its_pairs(run: Callable[..., np.ndarray], count: int, transposed: bool) -> None:
    cells = np.random.default_rng(4).permutation(2048).astype(np.uint16)
    rows = (np.random.default_rng(5).permutation(256)[:32] * 8).astype(np.uint32)
    name = f"ldmatrix_x{count}{'_trans' if transposed else ''}"
    out = run(name, cells, rows, shape=(count, 32), dtype=np.uint32)
    for m in range(count):
        matrix = np.stack([cells[start : start + 8] for start in rows[8 * m : 8 * m + 8]])
        matrix = matrix.T if transposed else matrix
        # Lane i holds elements 2 * (i % 4) and the next of row i / 4.
        assert matrix.reshape(32, 2).tolist() == out[m].view(np.uint16).reshape(32, 2).tolist()


def fragments_of_a(a: np.ndarray) -> np.ndarray:
    """[16, 16] as [32, 8]: PTX's table of the registers of A for m16n8k16."""
    out = np.empty((32, 8), a.dtype)
    for lane in LANES:
        for i in range(8):
            row = lane // 4 + (8 if i in (2, 3, 6, 7) else 0)
            out[lane, i] = a[row, lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)]
    return out


def fragments_of_b(b: np.ndarray) -> np.ndarray:
    """[16, 8] as [32, 4]."""
    out = np.empty((32, 4), b.dtype)
    for lane in LANES:
        for i in range(4):
            out[lane, i] = b[lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4]
    return out


def fragments_of_c(c: np.ndarray) -> np.ndarray:
    """[16, 8] as [32, 4]."""
    return np.array(
        [[c[lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)] for i in range(4)] for lane in LANES], np.float32
    )


@pytest.mark.parametrize(("name", "dtype"), [("mma_f16", np.float16), ("mma_bf16", ml_dtypes.bfloat16)])
def test_mma_multiplies_matrices(run: Callable[..., np.ndarray], name: str, dtype: type) -> None:
    rng = np.random.default_rng(6)
    a: np.ndarray = rng.standard_normal((16, 16)).astype(dtype)
    b: np.ndarray = rng.standard_normal((16, 8)).astype(dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = run(name, fragments_of_a(a).view(np.uint32), fragments_of_b(b).view(np.uint32), fragments_of_c(c),
            shape=(32, 4), dtype=np.float32)  # fmt: skip
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(d, fragments_of_c(exact), rtol=1e-5, atol=1e-5)
