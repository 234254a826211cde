"""One layer's attention as the product launches it: its plan, its kernels, over as many pools of KV as take turns."""

import ctypes
import math

import numpy as np

from service.errors import ConfigError
from service.executor.cuda.attention_plan import AttentionPlanner
from service.executor.cuda.kernels import Scalar
from service.executor.cuda.plan_layout import PlanCounts, PlanLayout, PlanLimits
from tests.cuda.gpu_check.attention_cases import TimedCase
from tests.cuda.gpu_check.compilation import kernel_config
from tests.cuda.gpu_check.device import CheckDevice

BLOCK_SIZE = 16
SHAPES = ("decode", "prefill")
NUM_RANDOM = 1 << 22  # numbers that are drawn; memory is filled with copies of them


class AttentionStep:
    """Called with 0, 1, ... it enqueues the launches over the next pool. Its owner closes it."""

    def __init__(self, device: CheckDevice, case: TimedCase, num_pools: int) -> None:
        """Raises MemoryError where the device has not so much memory."""
        self._device, self._case = device, case
        self._addresses: list[int] = []
        heads = case.heads
        kinds = {"is_fp8": case.is_kv_fp8, "logit": Scalar.BF16}  # as in step 1, which has compiled it
        config = kernel_config(device, Scalar.BF16, heads.head_dim, BLOCK_SIZE, **kinds)
        self._kernels = device.kernels(config)
        resident = [device.num_sms * device.blocks_per_sm(self._kernels[f"attn_{each}"]) for each in SHAPES]
        num_ranges, prefill_blocks = (max(1, each // heads.num_kv_heads) for each in resident)
        self._limits = PlanLimits(
            num_ranges=num_ranges,
            group_size=heads.num_heads // heads.num_kv_heads,
            max_seqs=len(case.contexts),
            max_tokens=case.num_tokens,
            max_context=max(case.contexts),
            tile_tokens=config.tile_tokens,
            prefill_rows=config.prefill.num_rows,
            resident_prefill_blocks=prefill_blocks,
            is_deterministic=case.is_deterministic,
        )
        rng = np.random.default_rng(3)
        try:
            self.counts, plan = self._plan()
            tables, kv = self._pools(num_pools, rng)
            self._arguments(plan, tables, kv, rng)
        except BaseException:
            self.close()
            raise

    def __call__(self, call: int) -> None:
        """Enqueue one step: the list of short sequences, then that of long ones, then what merges cut ones."""
        pool = call % len(self.decode_arguments)
        counts, heads = self.counts, self._case.heads.num_kv_heads
        if counts.num_decode_items:
            self._launch("attn_decode", (self._limits.num_ranges, heads, 1), self.decode_arguments[pool])
        if counts.num_prefill_items:
            self._launch("attn_prefill", (heads, counts.num_prefill_items, 1), self.prefill_arguments[pool])
        if counts.num_merges:
            self._launch("attn_combine", (counts.num_merges, heads, 1), self._combine_arguments)

    def output(self) -> np.ndarray:
        """bfloat16's bits, uint16[num_tokens, num_heads, head_dim]; what was not written is NaN."""
        self._device.copy_out(self._out_address, self.out)
        return self.out

    def is_output_finite(self) -> bool:
        """Whether every number of the output was written, and is neither NaN nor infinity."""
        return bool(((self.output() & 0x7F80) != 0x7F80).all())

    def close(self) -> None:
        while self._addresses:
            self._device.free(self._addresses.pop())

    def _plan(self) -> tuple[PlanCounts, dict[str, int]]:
        """What is in use of the plan, and its sections' addresses."""
        layout = PlanLayout.of(self._limits, has_prefill=True)
        planned = np.zeros(layout.size, np.int32)
        planner = AttentionPlanner(self._limits, layout, planned)
        counts = planner.fill(self._case.starts, np.array(self._case.contexts, np.int32))
        address = self._upload(planned)
        names = planner.sections._fields
        return counts, {name: address + 4 * offset for name, offset in zip(names, layout.offsets, strict=True)}

    def _pools(self, num_pools: int, rng: np.random.Generator) -> tuple[list[int], int]:
        """A block table for each pool, with blocks in random order, and the buffer that all blocks are of."""
        counts = [-(-context // BLOCK_SIZE) for context in self._case.contexts]
        self._columns = max(counts)
        order = rng.permutation(num_pools * sum(counts)).astype(np.int32).reshape(num_pools, -1)
        tables = np.full((num_pools, len(counts), self._columns), -1, np.int32)
        for pool, blocks in zip(tables, order, strict=True):
            for row, mine in zip(pool, np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
                row[: len(mine)] = mine
        return [self._upload(table) for table in tables], self._random_kv(
            order.size * BLOCK_SIZE * self._case.token_bytes, rng
        )

    def _arguments(self, plan: dict[str, int], tables: list[int], kv: int, rng: np.random.Generator) -> None:
        heads, limits = self._case.heads, self._limits
        shape = (self._case.num_tokens, heads.num_heads, heads.head_dim)
        q = self._upload(bf16(rng.standard_normal(shape, np.float32)))
        self.out = np.full(shape, 0xFFFF, np.uint16)  # NaN
        self._out_address = self._upload(self.out)
        slots = limits.max_slots * heads.num_kv_heads * 16
        part = self._upload(np.full(slots * heads.head_dim, np.nan, np.float32))
        lse = self._upload(np.full(slots, np.nan, np.float32))
        scale = math.log2(math.e) / math.sqrt(heads.head_dim)
        sizes = [*map(ctypes.c_int32, (self._columns, heads.num_kv_heads, limits.group_size, 0))]
        sizes += map(ctypes.c_float, (scale, 0.0, 1.0))
        pointer = ctypes.c_void_p

        def attention(items: str, indptr: str) -> list[list]:
            memory = ((q, kv, table, plan[items], plan[indptr], self._out_address, part, lse) for table in tables)
            return [[*map(pointer, addresses), *sizes] for addresses in memory]

        self.decode_arguments = attention("decode_items", "range_begin")
        self.prefill_arguments = attention("prefill_items", "num_prefill_items")
        merged = map(pointer, (part, lse, plan["merges"], plan["num_merges"], self._out_address))
        self._combine_arguments = [*merged, ctypes.c_int32(heads.num_kv_heads), ctypes.c_int32(limits.group_size)]

    def _launch(self, name: str, grid: tuple[int, int, int], arguments: list) -> None:
        kernel = self._kernels[name]
        self._device.launch(kernel.function, grid, (kernel.block_threads, 1, 1), kernel.shared_bytes, arguments)

    def _upload(self, array: np.ndarray) -> int:
        address = self._allocate(array.nbytes)
        self._device.copy_in(address, np.ascontiguousarray(array))
        return address

    def _allocate(self, num_bytes: int) -> int:
        try:
            self._addresses.append(self._device.allocate(num_bytes))
        except ConfigError as error:  # as kernels that do not compile raise too, which is another matter
            raise MemoryError(str(error)) from error
        return self._addresses[-1]

    def _random_kv(self, num_bytes: int, rng: np.random.Generator) -> int:
        """Random numbers once, copied until the memory is full."""
        count = min(NUM_RANDOM, num_bytes)
        if self._case.is_kv_fp8:  # any byte but e4m3's NaN; small, so that no row overflows
            chunk = (rng.integers(0, 0x40, count, np.uint8) | rng.integers(0, 2, count, np.uint8) << 7).view(np.uint8)
        else:
            chunk = bf16(rng.standard_normal(count // 2, np.float32))
        address = self._allocate(num_bytes)
        self._device.copy_in(address, chunk)
        filled = chunk.nbytes
        while filled < num_bytes:
            part = min(filled, num_bytes - filled)
            self._device.copy_within(address + filled, address, part)
            filled += part
        self._device.wait()
        return address


def bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
