"""Memory spaces, atomics, cp.async and barriers, against what they are defined to do."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from tests.cudasim.device import Argument, SimDevice, SimModule

Run = Callable[..., np.ndarray]


@pytest.fixture
def run(device: SimDevice, load: Callable[[str], SimModule]) -> Run:
    """`run(name, inputs..., shape=, dtype=, grid=, block=, shared=, out=)`: the last argument is the output."""

    def launch(
        name: str,
        *inputs: np.ndarray | Argument,
        shape: tuple[int, ...] = (32,),
        dtype: type = np.int32,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        shared: int = 0,
    ) -> np.ndarray:
        out = device.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        arguments = [np.uint64(device.upload(x)) if isinstance(x, np.ndarray) else x for x in inputs]
        kernel = load("memory_ops.cu").kernel(name)
        device.launch(kernel, grid, block, shared, [*arguments, np.uint64(out)])
        return device.download(out, shape, dtype)

    return launch


def test_threads_know_where_they_are(run: Run) -> None:
    out = run("shows_itself", shape=(24, 64, 4), dtype=np.uint32, grid=(2, 3, 4), block=(4, 8, 2), shared=48)
    np.testing.assert_array_equal(np.arange(24)[:, None] * 1000 + np.arange(64), out[:, :, 0])
    assert (out[:, :, 1] == np.arange(64) % 32).all()
    assert (out[:, :, 2] == 48).all()
    assert (out[:, :, 3] == (1 << (np.arange(64) % 32)) - 1).all()


class Numbers(ctypes.Structure):
    """As memory_ops.cu declares it."""

    _fields_ = (
        ("first", ctypes.c_byte), ("second", ctypes.c_short), ("third", ctypes.c_double), ("many", ctypes.c_float * 3)
    )  # fmt: skip


def test_arguments_may_be_structs(run: Run) -> None:
    numbers = Numbers(-3, -400, 2.25, (ctypes.c_float * 3)(1, 2, 8.5))
    out = run("takes_structs", numbers, np.int8(2), shape=(4,), dtype=np.float64, block=(1, 1, 1))
    assert [-3, -400, 2.25, 8.5] == out.tolist()


def test_tables_of_the_module(run: Run) -> None:
    which = np.arange(32, dtype=np.int32) % 4
    expected = np.array([1.5, 11.5, 102.5, 1003.5])[which]
    assert expected.tolist() == run("reads_tables", which, dtype=np.float32).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_static_and_dynamic_shared_arrays(device: SimDevice, run: Run, seed: int) -> None:
    device.set_seed(seed)
    numbers = np.random.default_rng(1).integers(-1000, 1000, 64).astype(np.int32)
    out = run("reverses", numbers, shape=(64,), block=(64, 1, 1), shared=64 * 16)
    assert (numbers[::-1] * 7).tolist() == out.tolist()


@pytest.mark.parametrize(("which", "start"), [(0, [5] * 32), (1, [2 * i for i in range(32)])])
def test_generic_pointers_reach_global_and_shared_memory(device: SimDevice, which: int, start: list[int],
                                                         load: Callable[[str], SimModule]) -> None:  # fmt: skip
    buffers = [device.upload(np.full(32, 5, np.int32)) for _ in range(2)]
    arguments: list[Argument] = [np.uint64(buffers[0]), np.uint64(buffers[1]), np.int32(which)]
    device.launch(load("memory_ops.cu").kernel("generic_pointers"), (1, 1, 1), (32, 1, 1), 0, arguments)
    assert [value + 101 for value in start] == device.download(buffers[1], (32,), np.int32).tolist()


def test_generic_pointers_reach_local_memory(device: SimDevice, load: Callable[[str], SimModule]) -> None:
    buffers = [device.upload(np.zeros(32, np.int32)) for _ in range(2)]
    arguments: list[Argument] = [np.uint64(buffers[0]), np.uint64(buffers[1]), np.int32(2)]
    device.launch(load("memory_ops.cu").kernel("generic_pointers"), (1, 1, 1), (32, 1, 1), 0, arguments)
    expected = [0] * 32
    for i in range(32):
        expected[i * 7 & 31] = 3 * i + 101
    assert expected == device.download(buffers[1], (32,), np.int32).tolist()


def test_narrow_loads_extend_the_sign(run: Run) -> None:
    values = np.arange(-16, 16, dtype=np.int8)
    assert values.tolist() == run("narrow_loads", values).tolist()


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def wrapped_inc(old: int, limit: int) -> int:
    return 0 if old >= limit else old + 1


def wrapped_dec(old: int, limit: int) -> int:
    return limit if old == 0 or old > limit else old - 1


@pytest.mark.parametrize(
    ("name", "dtype", "step"),
    [
        ("add_u32", np.uint32, lambda old, b: (old + b) % (1 << 32)),
        ("add_u64", np.uint64, lambda old, b: (old + b) % (1 << 64)),
        ("add_f32", np.float32, lambda old, b: np.float32(old) + np.float32(b)),
        ("min_s32", np.uint32, lambda old, b: min(old, b, key=signed)),
        ("max_u64", np.uint64, max),
        ("and_b32", np.uint32, lambda old, b: old & b),
        ("or_b32", np.uint32, lambda old, b: old | b),
        ("xor_b64", np.uint64, lambda old, b: old ^ b),
        ("inc_u32", np.uint32, wrapped_inc),
        ("dec_u32", np.uint32, wrapped_dec),
    ],
)
def test_atomics_on_shared_and_global_memory(
    device: SimDevice, load: Callable[[str], SimModule], name: str, dtype: type, step: Callable[[int, int], int]
) -> None:
    rng = np.random.default_rng(2)
    values: np.ndarray = rng.integers(0, 1 << 32, 64).astype(dtype)
    start: np.ndarray = rng.integers(0, 1 << 32, 8).astype(dtype)
    if name == "add_f32":
        values, start = (each % 1000 for each in (values, start))
    if name in ("inc_u32", "dec_u32"):
        values, start = values % 5, start % 7
    cells, old = device.upload(start), device.upload(np.zeros(128, dtype))
    kernel = load("memory_ops.cu").kernel(f"atom_{name}")
    device.launch(kernel, (1, 1, 1), (64, 1, 1), 0, [np.uint64(x) for x in (device.upload(values), cells, old)])
    now, before = start.tolist(), []
    for i, value in enumerate(values.tolist()):
        before.append(now[i % 8])
        now[i % 8] = step(now[i % 8], value)
    seen = device.download(old, (128,), dtype)
    assert before == seen[:64].tolist()
    assert now == seen[64:72].tolist()
    assert now == device.download(cells, (8,), dtype).tolist()


@pytest.mark.parametrize("seed", [0, 3])
def test_every_thread_gets_a_ticket_of_its_own(device: SimDevice, load: Callable[[str], SimModule], seed: int) -> None:
    device.set_seed(seed)
    next_ticket, owner = device.upload(np.zeros(1, np.uint32)), device.upload(np.zeros(256, np.uint32))
    kernel = load("memory_ops.cu").kernel("takes_tickets")
    device.launch(kernel, (4, 1, 1), (64, 1, 1), 0, [np.uint64(next_ticket), np.uint64(owner)])
    owners = device.download(owner, (256,), np.uint32).tolist()
    assert list(range(256)) == sorted(owners)
    assert (owners == list(range(256))) == (seed == 0)


def test_swaps_return_what_was_there(device: SimDevice, load: Callable[[str], SimModule]) -> None:
    cells, old = device.upload(np.array([4, 5, 6, 5], np.uint32)), device.upload(np.zeros(8, np.uint32))
    kernel = load("memory_ops.cu").kernel("swaps")
    device.launch(kernel, (1, 1, 1), (4, 1, 1), 0, [np.uint64(cells), np.uint64(old)])
    assert [4, 5, 6, 5, 4, 6, 6, 6] == device.download(old, (8,), np.uint32).tolist()
    assert [9, 9, 9, 9] == device.download(cells, (4,), np.uint32).tolist()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_up_with_zeros(run: Run, size: int) -> None:
    source = np.random.default_rng(3).integers(1, 256, (32, size)).astype(np.uint8)
    valid = (np.arange(32) % (size + 1)).astype(np.uint32)
    out = run(f"copy_{size}", source, valid, shape=(32, size), dtype=np.uint8)
    assert np.where(np.arange(size) < valid[:, None], source, 0).tolist() == out.tolist()


def test_groups_of_copies_land_one_after_another(run: Run) -> None:
    source = np.array([3, 5, 7], np.int32)
    assert [3, 5, 7] == run("copies_in_groups", source, shape=(3,), block=(1, 1, 1)).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_barriers_with_counts_join_some_warps(device: SimDevice, run: Run, seed: int) -> None:
    device.set_seed(seed)
    out = run("pairs_of_warps", shape=(2, 2, 32), block=(128, 1, 1))
    expected = np.arange(32) + 64 * np.arange(2)[:, None, None] + 1000 * np.arange(2)[:, None]
    np.testing.assert_array_equal(expected, out)


@pytest.mark.parametrize("values", [[0] * 64, [1] * 64, [0, 1] * 32, [0] * 63 + [2]])
def test_barriers_reduce_a_predicate(run: Run, values: list[int]) -> None:
    out = run("counts_at_a_barrier", np.array(values, np.int32), shape=(64,), block=(64, 1, 1))
    count = sum(value != 0 for value in values)
    assert [count * 100 + (count == 64) * 10 + (count > 0)] * 64 == out.tolist()


def test_a_thread_that_spins_lets_its_block_go_on(run: Run) -> None:
    assert list(range(64)) == run("spins_within_the_block", shape=(64,), block=(64, 1, 1)).tolist()


def test_jump_tables(run: Run) -> None:
    which = np.arange(32, dtype=np.int32) % 3
    assert (which + 10).tolist() == run("jumps_through_a_table", which).tolist()
