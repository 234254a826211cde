"""The steps of the GPU check that measure. They judge no speed, and have not run on a GPU yet."""

import ctypes
import math
from statistics import median

import numpy as np

from service.executor.cuda.attention_plan import AttentionPlanner, PlanLayout, PlanLimits
from service.executor.cuda.kernels import KernelConfig, Scalar, choose_tile_tokens
from service.executor.cuda.launch import LoadedKernel
from tests.cuda.gpu_check_device import CheckDevice, CudaDevice, NotRunError, StepFailedError
from tests.cuda.gpu_check_steps import Table

COPY_BYTES = 2 << 30
ROTATED_BYTES = 1 << 29  # of KV that launches take turns in, so that no cache holds what the next one reads
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
BLOCK_BYTES = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2  # bfloat16
CALLS, ROUNDS = 20, 5
UNFINISHED = "not timed: NaN or infinity in the output"


def ceilings(device: CheckDevice) -> Table:
    """Bytes read and written by a copy on the device, a second."""
    return [{"device copy GB/s": round(copy_rate(_gpu(device)) / 1e9, 1)}]


def decode_times(device: CheckDevice) -> Table:
    """Attention of one layer for one token a sequence, over random keys and values.

    Launches are eager, 20 between two events: where a launch takes less than the host needs for it, the host is timed.
    """
    gpu = _gpu(device)
    rate = copy_rate(gpu)
    rows: Table = []
    for batch in (1, 8, 64, 256):
        for context in (512, 2048, 8192):
            rows.append({"batch": batch, "context": context, **_time_decode(gpu, batch, context, rate)})
    if unfinished := sum(row["us"] == UNFINISHED for row in rows):
        raise StepFailedError(f"{unfinished} of {len(rows)} outputs have NaN or infinity", rows)
    return rows


def copy_rate(gpu: CudaDevice) -> float:
    """Bytes a second, read and written ones counted; the median of several rounds."""
    num_bytes = min(COPY_BYTES, gpu.driver.free_bytes() // 4)
    source, target = gpu.driver.allocate(num_bytes), gpu.driver.allocate(num_bytes)
    try:
        gpu.driver.clear(source, num_bytes)

        def copy(_: int) -> None:
            gpu.driver.copy_within(target, source, num_bytes)

        gpu.seconds(copy, 2)
        return 2 * num_bytes / median(gpu.seconds(copy, CALLS) for _ in range(ROUNDS))
    finally:
        gpu.driver.free(source)
        gpu.driver.free(target)


def _gpu(device: CheckDevice) -> CudaDevice:
    if not isinstance(device, CudaDevice):
        raise NotRunError("needs a GPU: the simulator tells no times")
    return device


def _time_decode(gpu: CudaDevice, batch: int, context: int, rate: float) -> dict[str, object]:
    blocks = batch * context // BLOCK_SIZE
    num_pools = max(1, -(-ROTATED_BYTES // (blocks * BLOCK_BYTES)))
    if num_pools * blocks * BLOCK_BYTES > 0.8 * gpu.driver.free_bytes():
        return {"us": "not run: not enough memory"}
    decode = Decode(gpu, batch, context, num_pools)
    try:
        decode(0)
        if not decode.is_output_finite():
            return {"us": UNFINISHED}
        gpu.seconds(decode, CALLS)
        seconds = median(gpu.seconds(decode, CALLS) for _ in range(ROUNDS))
    finally:
        decode.close()
    num_bytes = blocks * BLOCK_BYTES + 2 * batch * NUM_HEADS * HEAD_DIM * 2
    speed = num_bytes / seconds
    return {"us": round(seconds * 1e6, 1), "GB/s": round(speed / 1e9, 1), "of copy": round(speed / rate, 3)}


class Decode:
    """One decode step's attention, with the product's plan, over as many pools of KV blocks as take turns."""

    def __init__(self, gpu: CudaDevice, batch: int, context: int, num_pools: int) -> None:
        self._gpu, self._batch = gpu, batch
        self._addresses: list[int] = []
        tile = choose_tile_tokens(HEAD_DIM, is_kv_fp8=False, max_shared_bytes=gpu.modules.max_shared_bytes)
        kernels = gpu.kernels(KernelConfig(Scalar.BF16, HEAD_DIM, BLOCK_SIZE, tile))
        self._decode, self._combine = kernels["attn_decode"], kernels["attn_combine"]
        resident = gpu.driver.num_sms * gpu.driver.blocks_per_sm(self._decode)
        group = NUM_HEADS // NUM_KV_HEADS
        self._limits = PlanLimits(max(1, resident // NUM_KV_HEADS), group, batch, batch, context, tile)
        layout = PlanLayout.of(self._limits, has_prefill=False)
        planned = np.zeros(layout.size, np.int32)
        planner = AttentionPlanner(self._limits, layout, planned)
        starts = np.arange(batch + 1, dtype=np.int32)
        self.num_partials = planner.fill(starts, np.full(batch, context, np.int32)).num_partials
        plan = self._upload(planned)
        ranges, parts, items = (plan + 4 * offset for offset in layout.offsets[:3])
        rng = np.random.default_rng(3)
        columns = context // BLOCK_SIZE
        order = rng.permutation(num_pools * batch * columns).astype(np.int32).reshape(num_pools, batch, columns)
        tables = [self._upload(table) for table in order]
        kv = self._random_kv(order.size * BLOCK_BYTES, rng)
        shape = (batch, NUM_HEADS, HEAD_DIM)
        q = self._upload(_bf16(rng.standard_normal(shape)))
        self.out = np.full(shape, 0xFFFF, np.uint16)  # NaN
        self._out_address = self._upload(self.out)
        slots = max(1, self._limits.max_partials) * NUM_KV_HEADS * 16
        part = self._upload(np.full(slots * HEAD_DIM, np.nan, np.float32))
        lse = self._upload(np.full(slots, np.nan, np.float32))
        scale = math.log2(math.e) / math.sqrt(HEAD_DIM)
        sizes = [*map(ctypes.c_int32, (columns, NUM_KV_HEADS, group, 0)), *map(ctypes.c_float, (scale, 0.0, 1.0))]
        pointer = ctypes.c_void_p
        self.decode_arguments = [
            [*map(pointer, (q, kv, table, items, ranges, self._out_address, part, lse)), *sizes] for table in tables
        ]
        merged = map(pointer, (part, lse, parts, self._upload(starts), self._out_address))
        self._combine_arguments = [*merged, ctypes.c_int32(NUM_KV_HEADS), ctypes.c_int32(group)]

    def __call__(self, call: int) -> None:
        """Enqueue one step."""
        arguments = self.decode_arguments[call % len(self.decode_arguments)]
        self._launch(self._decode, self._limits.num_ranges, arguments)
        if self.num_partials:
            self._launch(self._combine, self._batch, self._combine_arguments)

    def is_output_finite(self) -> bool:
        """Whether every number of the output was written, and is neither NaN nor infinity."""
        self._gpu.copy_out(self._out_address, self.out)
        return bool(((self.out & 0x7F80) != 0x7F80).all())

    def close(self) -> None:
        while self._addresses:
            self._gpu.free(self._addresses.pop())

    def _launch(self, kernel: LoadedKernel, blocks: int, arguments: list) -> None:
        grid, block = (blocks, NUM_KV_HEADS, 1), (kernel.block_threads, 1, 1)
        self._gpu.launch(kernel.function, grid, block, kernel.shared_bytes, arguments)

    def _upload(self, array: np.ndarray) -> int:
        self._addresses.append(self._gpu.upload(np.ascontiguousarray(array)))
        return self._addresses[-1]

    def _random_kv(self, num_bytes: int, rng: np.random.Generator) -> int:
        """Random numbers once, copied until the memory is full."""
        chunk = _bf16(rng.standard_normal(1 << 22))
        address = self._gpu.driver.allocate(num_bytes)
        self._addresses.append(address)
        self._gpu.driver.copy_in(address, chunk[: num_bytes // 2])
        self._gpu.driver.wait()
        filled = min(chunk.nbytes, num_bytes)
        while filled < num_bytes:
            count = min(filled, num_bytes - filled)
            self._gpu.driver.copy_within(address + filled, address, count)
            filled += count
        self._gpu.driver.wait()
        return address


def _bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
