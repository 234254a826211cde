"""KV blocks in pinned host memory: whole after the way there and back, and how long the way takes."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np

from service.core.plan import StepPlan
from service.executor.cuda.device import Device
from service.executor.cuda.host_kv import HostKv
from service.executor.cuda.memory import DeviceKv, PinnedBuffer
from service.executor.kv_layout import KvDtype, KvLayout
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.host_device import HostDevice

EMPTY = StepPlan(0, *(np.empty(0, kind) for kind in (np.int32, np.int32, np.bool_)), 0, 0)
# An 8B model's 32 layers of 8 heads of 128: 2 MiB for a block of 16 tokens, 64 KiB of them in each layer.
LAYOUTS = {
    "sim": KvLayout(KvDtype.FLOAT16, 2, 17, 2, 16, 64),
    "cuda": KvLayout(KvDtype.FLOAT16, 32, 257, 8, 16, 128),
}
NUM_ROUNDS = 3


def host_kv(device: CheckDevice) -> Iterator[Row]:
    """Random blocks go out in any order and come back elsewhere; then a run of blocks, and single ones, are timed."""
    gpu: Device = device.driver if device.name == "cuda" else HostDevice(0)
    layout = LAYOUTS[device.name]
    num_blocks = layout.num_blocks - 1
    with ExitStack() as owned:
        kv = owned.enter_context(closing(DeviceKv(gpu, layout)))
        host = owned.enter_context(closing(HostKv(gpu, kv, num_blocks)))
        staged = owned.enter_context(closing(PinnedBuffer(gpu, layout.layer_bytes)))
        num_wrong = num_damaged(gpu, kv, host, staged)
        yield {"copies": "out, and in elsewhere", "blocks": num_blocks, "wrong in some layer": num_wrong}
        run = np.stack([np.arange(1, num_blocks + 1), np.arange(num_blocks)], axis=1).astype(np.int32)
        for name, plan in (("out", replace(EMPTY, offload=run)), ("in", replace(EMPTY, restore=run[:, ::-1]))):
            yield _row(f"{name}, in one run", num_blocks, _shortest_s(gpu, host, plan) / num_blocks, layout)
        yield _row("the slower way, one by one", num_blocks, host.measure_block_ns() / 1e9, layout)
    if num_wrong:
        raise StepFailedError(f"{num_wrong} blocks are not what they were")


def num_damaged(gpu: Device, kv: DeviceKv, host: HostKv, staged: PinnedBuffer) -> int:
    """Blocks that hold something else in some layer than was put in where they came from."""
    layout, rng = kv.layout, np.random.default_rng(1)
    num_blocks = layout.num_blocks - 1
    array = staged.view((layout.num_blocks, layout.layer_bytes // layout.num_blocks), np.uint8)
    sources, targets = 1 + rng.permutation(num_blocks), 1 + rng.permutation(num_blocks)
    host_blocks = rng.permutation(num_blocks)
    for layer, address in enumerate(kv.addresses):
        array[:] = _content(layer, array.shape)
        gpu.copy_in(address, array)
        gpu.wait()
    host.copy(replace(EMPTY, offload=np.stack([sources, host_blocks], axis=1).astype(np.int32)))
    for address in kv.addresses:
        gpu.clear(address, layout.layer_bytes)
    host.copy(replace(EMPTY, restore=np.stack([host_blocks, targets], axis=1).astype(np.int32)))
    is_wrong = np.zeros(num_blocks, np.bool_)
    for layer, address in enumerate(kv.addresses):
        gpu.copy_out(array, address)
        gpu.wait()
        is_wrong |= (array[targets] != _content(layer, array.shape)[sources]).any(axis=1)
    return int(np.count_nonzero(is_wrong))


def _content(layer: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(layer).integers(0, 256, shape, np.uint8)


def _shortest_s(gpu: Device, host: HostKv, plan: StepPlan) -> float:
    times_s = []
    for _ in range(NUM_ROUNDS):
        started_s = time.perf_counter()
        host.copy(plan)
        gpu.wait()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def _row(name: str, num_blocks: int, block_s: float, layout: KvLayout) -> Row:
    rate = layout.total_bytes / layout.num_blocks / block_s
    return {"copies": name, "blocks": num_blocks, "us a block": round(1e6 * block_s, 1), "GB/s": round(rate / 1e9, 2)}
