"""What this machine's memory can do at most: bytes that a copy moves and that a kernel reads."""

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import time_graph

READ_ONLY = Path(__file__).with_name("read_only.cu")
READ_THREADS = 512
NUM_BYTES = {"sim": 1 << 18, "cuda": 4 << 30}
NUM_WAITS = {"sim": 3, "cuda": 200}
BLOCKS_PER_SM = 4  # 2048 threads


def ceilings(device: CheckDevice) -> Iterator[Row]:
    """The share is of the memory's data sheet."""
    for what, wait in (("a word copied, waited for asleep", device.wait), ("the same, spinning", device.spin)):
        yield {"ceiling": what, "us": round(1e6 * wait_seconds(device, wait), 1)}
    peak = device.peak_bytes_per_s()
    num_bytes = min(NUM_BYTES[device.name], device.free_bytes() // 4)
    for what, measure in (("copy, read + written", copy_rate), ("read only", read_rate)):
        rate = measure(device, num_bytes)
        yield {"ceiling": what, "GB/s": round(rate / 1e9, 1), "of peak": f"{rate / peak:.3f}" if peak else ""}


def wait_seconds(device: CheckDevice, wait: Callable[[], None]) -> float:
    """The median of what the host takes for next to nothing on the device: what each way of waiting costs a step."""
    memory = device.allocate(8)
    times = []
    try:
        for _ in range(NUM_WAITS[device.name]):
            started = time.perf_counter()
            device.copy_within(memory + 4, memory, 4)
            wait()
            times.append(time.perf_counter() - started)
    finally:
        device.free(memory)
    return median(times)


def copy_rate(device: CheckDevice, num_bytes: int) -> float:
    """Bytes a second, read and written ones counted."""
    source, target = device.allocate(num_bytes), device.allocate(num_bytes)
    try:
        return 2 * num_bytes / time_graph(device, lambda _: device.copy_within(target, source, num_bytes), 1).best
    finally:
        device.free(source)
        device.free(target)


def read_rate(device: CheckDevice, num_bytes: int, kernel: int | None = None) -> float:
    """Bytes a second, of `kernel` or of read_only.cu's. Raises StepFailedError if not every word was read."""
    words = np.random.default_rng(2).integers(0, 1 << 32, min(num_bytes, 1 << 20) // 4, np.uint32)
    num_copies = (num_bytes // words.nbytes - 1) | 1  # odd, so that their xor is that of one
    grid = BLOCKS_PER_SM * device.num_sms
    source, out = device.allocate(num_copies * words.nbytes), device.upload(np.zeros(grid * READ_THREADS, np.uint32))
    try:
        device.copy_in(source, words)
        for copy in range(1, num_copies):
            device.copy_within(source + copy * words.nbytes, source, words.nbytes)
        kernel = kernel or device.load(READ_ONLY, ()).kernel("read_only")
        arguments = [ctypes.c_void_p(source), ctypes.c_void_p(out), ctypes.c_int64(num_copies * words.size // 4)]
        timing = time_graph(
            device, lambda _: device.launch(kernel, (grid, 1, 1), (READ_THREADS, 1, 1), 0, arguments), 1
        )
        found = np.empty(grid * READ_THREADS, np.uint32)
        device.copy_out(out, found)
    finally:
        device.free(source)
        device.free(out)
    expected = np.bitwise_xor.reduce(words)
    if np.bitwise_xor.reduce(found) != expected:
        raise StepFailedError("the read-only kernel did not read every word once")
    return num_copies * words.nbytes / timing.best
