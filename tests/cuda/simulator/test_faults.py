"""Kernels with one fault each: the simulator says which, and names the line."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cudasim.build import missing_sanitizer, missing_tool
from tests.cudasim.device import SimDevice, SimError, SimModule
from tests.cudasim.sanitized import run_case

SOURCE = Path(__file__).with_name("faults.cu")
HERE = "tests.cuda.simulator.test_faults"


def line_of(fault: str) -> str:
    """Where a fault lies, as messages name it."""
    lines = SOURCE.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"// fault {fault}"))
    return f"faults.cu:{number}"


def launch(device: SimDevice, name: str, *arguments: int, blocks: int = 1, threads: int = 32) -> None:
    """Launch a kernel on a buffer of zeros for each number of words."""
    pointers = [np.uint64(device.upload(np.zeros(words, np.int32))) for words in arguments]
    kernel = device.load(SOURCE).kernel(name)
    device.launch(kernel, (blocks, 1, 1), (threads, 1, 1), 128 if name == "dynamic_overrun" else 0, pointers)


@pytest.mark.parametrize(
    ("name", "words", "threads", "message"),
    [
        ("leaves_before_barrier", [64], 64, "a thread leaves the kernel while others wait|after a thread has left"),
        ("different_barriers", [64], 64, "threads meet in different barriers"),
        ("barrier_counts", [64], 64, "different counts: 32 here, 64 at"),
        ("outside_own_mask", [32], 32, "outside its own mask 0x0000ffff"),
        ("overlapping_masks", [32], 32, "overlapping masks: 0xffff0000 here, 0x0001ffff"),
        ("reads_absent_lane", [32], 32, "lane 15 reads lane 16, which is outside the mask"),
        ("different_operations", [32], 32, "lanes meet in different warp operations: shfl.sync here, bar.warp.sync"),
        ("lanes_missing", [64], 32, "deadlock.*threads 0 to 7 wait in shfl.sync"),
        ("partial_warp_mma", [40], 40, "mma.sync needs a full warp"),
        ("waits_for_ever", [1], 32, "still looping after 100352 backward branches"),
        ("static_overrun", [32], 32, "thread 31: out of bounds of an array in shared memory"),
        ("dynamic_overrun", [32], 32, "thread 31: address .* lies outside shared memory"),
        ("unconverted_pointer", [32], 32, "was a pointer not converted to a shared address"),
        ("nobody_wrote", [32], 32, "thread 0: reads shared memory that nobody wrote"),
        ("too_little_alignment", [32], 32, "misaligned access of 4 bytes at shared address"),
        ("misaligned_global", [32, 32], 32, "misaligned access of 4 bytes"),
        ("division_by_zero", [32], 32, "integer division by zero"),
        ("wild_address", [32], 32, "which is no memory"),
        ("traps", [32], 32, "trap"),
        ("reads_before_wait", [4, 1], 1, "before the wait that covers its cp.async"),
        ("waits_uncommitted", [4, 1], 1, "before the wait that covers its cp.async"),
        ("never_commits", [4, 1], 1, "cp.async that it never committed"),
        ("leaves_in_flight", [4, 1], 1, "leaves with cp.async in flight"),
        ("writes_in_flight", [4, 1], 1, "that a cp.async in flight writes too"),
        ("copies_in_flight", [4, 1], 1, "that a cp.async in flight writes too"),
        ("copies_too_much", [4, 1], 1, "source size 20 above 16"),
        ("misaligned_copy", [8, 1], 1, "misaligned access of 16 bytes"),
    ],
)
def test_a_plain_run_names_the_fault(
    device: SimDevice, name: str, words: list[int], threads: int, message: str
) -> None:
    device.set_max_branches(100_000)
    with pytest.raises(SimError, match=re.compile(message, re.S)) as raised:
        launch(device, name, *words, threads=threads)
    if f"// fault {name}" in SOURCE.read_text():
        assert line_of(name) in str(raised.value)
    assert name in str(raised.value)


def test_a_device_works_on_after_a_fault(device: SimDevice, load: Callable[[str], SimModule]) -> None:
    for _ in range(3):
        with pytest.raises(SimError, match="trap"):
            launch(device, "traps", 32)
        launch(device, "last_block_with_fences", 8, 1, 1, blocks=8)


def sanitized_case(device: SimDevice, name: str, blocks: str, threads: str, *words: str) -> None:
    """The case that the tests below run in a process with a sanitizer."""
    launch(device, name, *map(int, words), blocks=int(blocks), threads=int(threads))


def past_the_end(device: SimDevice, count: str) -> None:
    """Reads element `count` of 8."""
    pointers = [np.uint64(device.upload(np.zeros(words, np.int32))) for words in (8, 1)]
    device.launch(
        device.load(SOURCE).kernel("reads_past_the_end"), (1, 1, 1), (1, 1, 1), 0, [*pointers, np.int32(int(count))]
    )


def sanitized_fault(flavour: str, case: str, *arguments: object) -> str:
    if reason := missing_tool() or missing_sanitizer(flavour):
        pytest.skip(reason)
    return run_case(flavour, 0, f"{HERE}:{case}", *map(str, arguments)).fault


def test_asan_sees_one_element_too_far_and_not_the_last() -> None:
    assert sanitized_fault("asan", "past_the_end", 8) == f"heap-buffer-overflow at {line_of('reads_past_the_end')}"
    assert sanitized_fault("asan", "past_the_end", 7) == ""


@pytest.mark.parametrize(
    ("name", "words", "fault"),
    [
        ("writes_before_the_start", [4], "heap-buffer-overflow"),
        ("copies_past_the_end", [4, 1], "heap-buffer-overflow"),
        ("leaves_local_array", [8, 1], "stack-buffer-overflow"),
    ],
)
def test_asan_names_the_line(name: str, words: list[int], fault: str) -> None:
    assert sanitized_fault("asan", "sanitized_case", name, 1, 1, *words) == f"{fault} at {line_of(name)}"


@pytest.mark.parametrize(
    ("name", "blocks", "threads", "words"),
    [
        ("no_barrier", 1, 64, [64]),
        ("shuffle_is_no_fence", 1, 32, [32]),
        ("blocks_write_one_cell", 2, 32, [1]),
    ],
)
def test_tsan_sees_a_race(name: str, blocks: int, threads: int, words: list[int]) -> None:
    fault = sanitized_fault("tsan", "sanitized_case", name, blocks, threads, *words)
    assert fault.startswith("data race at ")
    assert line_of(name) in fault


def test_tsan_knows_fences() -> None:
    assert sanitized_fault("tsan", "sanitized_case", "last_block_with_fences", 8, 32, 8, 1, 1) == ""
    assert sanitized_fault("tsan", "sanitized_case", "last_block_without_fences", 8, 32, 8, 1, 1).startswith(
        "data race"
    )
