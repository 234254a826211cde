"""Launches: what is recorded, what is refused, and launching without Python in between."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cudasim.device import Dim3, Launch, SimDevice, SimError, SimModule

SUCCESS, INVALID_VALUE, LAUNCH_FAILED = 0, 1, 719
DRIVER_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)


@pytest.fixture
def module(load: Callable[[str], SimModule]) -> SimModule:
    return load("memory_ops.cu")


def test_launches_are_recorded_byte_for_byte(device: SimDevice, module: SimModule) -> None:
    which, out = device.upload(np.zeros(32, np.int32)), device.allocate(512)
    device.launch(module.kernel("reads_tables"), (1, 1, 1), (32, 1, 1), 0, [np.uint64(which), ctypes.c_void_p(out)])
    device.launch(module.kernel("shows_itself"), (1, 1, 1), (8, 1, 1), 16, [np.uint64(out)])
    pointers = [address.to_bytes(8, "little") for address in (which, out)]
    assert [
        Launch("reads_tables", (1, 1, 1), (32, 1, 1), 0, b"".join(pointers)),
        Launch("shows_itself", (1, 1, 1), (8, 1, 1), 16, pointers[1]),
    ] == device.launches


def test_a_launch_through_the_drivers_function(device: SimDevice, module: SimModule) -> None:
    launch = DRIVER_LAUNCH(device.launch_pointer)
    which, out = device.upload(np.arange(32, dtype=np.int32) % 4), device.allocate(128)
    cells = [ctypes.c_void_p(which), ctypes.c_void_p(out)]
    arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(cell) for cell in cells))
    assert SUCCESS == launch(module.kernel("reads_tables"), 1, 1, 1, 32, 1, 1, 0, None, arguments, None)
    assert [1.5, 11.5, 102.5, 1003.5] * 8 == device.download(out, (32,), np.float32).tolist()
    assert ["reads_tables"] == [each.kernel for each in device.launches]
    assert device.failure == ""
    # The same with a fault.
    zero = ctypes.c_void_p(device.upload(np.zeros(1, np.int32)))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(zero))
    kernel = module.kernel("traps_in_a_header")
    assert LAUNCH_FAILED == launch(kernel, 1, 1, 1, 32, 1, 1, 0, None, arguments, None)
    assert "trap" in device.failure


def test_a_fault_in_a_header_names_both_lines(device: SimDevice, module: SimModule) -> None:
    here = Path(__file__).parent
    header = (here / "located.cuh").read_text().splitlines().index("  if (is_bad) __trap();") + 1
    caller = next(
        i for i, x in enumerate((here / "memory_ops.cu").read_text().splitlines(), 1) if x.endswith("// here")
    )
    with pytest.raises(SimError, match=f"^located.cuh:{header} called from memory_ops.cu:{caller}: "):
        device.launch(
            module.kernel("traps_in_a_header"),
            (1, 1, 1), (1, 1, 1), 0, [np.uint64(device.upload(np.zeros(1, np.int32)))],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "dims", "reason"),
    [
        ("shows_itself", ((0, 1, 1), (32, 1, 1), 0), "the grid is empty"),
        ("shows_itself", ((1, 65536, 1), (32, 1, 1), 0), "larger than 65,535"),
        ("shows_itself", ((1, 1, 1), (1025, 1, 1), 0), "1 to 1,024 threads"),
        ("shows_itself", ((1, 1, 1), (1, 1, 65), 0), "at most 64 in z"),
        ("at_most_64_threads", ((1, 1, 1), (65, 1, 1), 0), "__launch_bounds__"),
        ("much_shared", ((1, 1, 1), (32, 1, 1), 48 * 1024 + 1), "more dynamic shared memory"),
    ],
)
def test_what_the_driver_would_refuse(
    device: SimDevice, module: SimModule, kernel: str, dims: tuple[Dim3, Dim3, int], reason: str
) -> None:
    grid, block, shared = dims
    with pytest.raises(SimError, match=reason):
        device.launch(module.kernel(kernel), grid, block, shared, [np.uint64(device.allocate(4096))])
    assert device.launches == []


def test_limits_are_reached(device: SimDevice, module: SimModule) -> None:
    out = [np.uint64(device.allocate(4096))]
    device.launch(module.kernel("at_most_64_threads"), (1, 1, 1), (64, 1, 1), 0, out)
    device.launch(module.kernel("much_shared"), (1, 1, 1), (1024, 1, 1), 48 * 1024, out)
    device.set_max_shared_bytes(module.kernel("much_shared"), 227 * 1024)
    device.launch(module.kernel("much_shared"), (1, 1, 1), (32, 1, 1), 227 * 1024, out)
    with pytest.raises(SimError, match="more than a block can have"):
        device.set_max_shared_bytes(module.kernel("much_shared"), 227 * 1024 + 1)


def test_copies_stay_within_a_buffer(device: SimDevice) -> None:
    address = device.allocate(16)
    assert np.isnan(device.download(address, (4,), np.float32)).all()
    device.copy_in(address + 8, np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="lie in no buffer"):
        device.copy_in(address + 8, np.zeros(3, np.int32))
    device.free(address)
    with pytest.raises(KeyError):
        device.free(address)


def test_a_module_knows_its_kernels(module: SimModule) -> None:
    assert {"reverses", "swaps", "copy_16"} < set(module.names)
    with pytest.raises(KeyError, match="no kernel nothing"):
        module.kernel("nothing")
