"""ONNX Runtime's own PagedAttention on the same cases: 16 tokens a block, and 128, which its fast kernels take.

It also writes the new token's keys and values, which ours leaves to rope_kv_write.
"""

import math
from collections.abc import Iterator
from contextlib import closing

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from tests.cuda.gpu_check.attention_cases import HEADS, TimedCase
from tests.cuda.gpu_check.attention_step import bf16
from tests.cuda.gpu_check.attention_times import ROTATED_BYTES, num_pools
from tests.cuda.gpu_check.device import CheckDevice, NotRunError, need_gpu
from tests.cuda.gpu_check.ort_session import open_session
from tests.cuda.gpu_check.peers.torch_case import MAX_ERROR, checked, peer_decode_cases
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import time_calls

BF16, INT32 = TensorProto.BFLOAT16, TensorProto.INT32
BLOCK_SIZES = (16, 128)
NUM_RANDOM = 1 << 20  # bfloat16 numbers that caches are filled with copies of


def times(device: CheckDevice) -> Iterator[Row]:
    need_gpu(device, "ONNX Runtime has no PagedAttention for CPUs")
    return checked(_rows(device))


def _rows(device: CheckDevice) -> Iterator[Row]:
    for block_size in BLOCK_SIZES:
        for case in peer_decode_cases():
            if case.heads != HEADS[0]:
                continue
            row: Row = {"case": case.name, "peer": f"ort PagedAttention, blocks of {block_size}"}
            try:
                yield row | _time(device, case, block_size)
            except NotRunError:
                raise
            except Exception as error:  # what ONNX Runtime raises; the next case may still run
                said = (str(error).strip() or "no message").splitlines()[0]
                yield row | {"not timed": f"{type(error).__name__}: {said[:200]}"}


def _time(device: CheckDevice, case: TimedCase, block_size: int) -> Row:
    pool_bytes = case.num_blocks(block_size) * block_size * case.token_bytes
    pools = num_pools(pool_bytes, ROTATED_BYTES[device.name], device.l2_bytes, device.free_bytes())
    if not pools:
        return {"not timed": "not enough memory"}
    with closing(OrtCase(device, case, block_size, pools)) as made:
        made.run(0)
        error = made.error()
        if not error <= MAX_ERROR:
            return {"error": f"{error:.1e}", "not timed": "its answer is wrong"}
        timing = time_calls(device, lambda call: made.run(call % pools), max(pools, 4))
    row = {"error": f"{error:.1e}", **timing.cells(), "launched": "eager"}
    return row | {"GB/s": round(case.num_bytes / timing.best / 1e9, 1)}


def paged_attention_model(case: TimedCase, block_size: int) -> bytes:
    """The op alone; caches are inputs and outputs, bound to the same memory."""
    heads = case.heads
    batch, columns = len(case.contexts), max(case.contexts) // block_size
    cache = (case.num_blocks(block_size), block_size, heads.num_kv_heads, heads.head_dim)
    new = (batch, heads.num_kv_heads * heads.head_dim)
    hidden = (batch, heads.num_heads * heads.head_dim)
    inputs = {"query": (BF16, hidden), "key": (BF16, new), "value": (BF16, new)}
    inputs |= {"key_cache": (BF16, cache), "value_cache": (BF16, cache), "cumulative": (INT32, (batch + 1,))}
    inputs |= {"past": (INT32, (batch,)), "table": (INT32, (batch, columns)), "bounds": (INT32, (2,))}
    outputs = {"out": (BF16, hidden), "key_cache_out": (BF16, cache), "value_cache_out": (BF16, cache)}
    # cos, sin, slots, sink, norms and scales are left out.
    names = [*list(inputs)[:8], *[""] * 8, "bounds"]
    attributes = {"num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads}
    node = helper.make_node("PagedAttention", names, list(outputs), domain="com.microsoft", **attributes)
    values = [[helper.make_tensor_value_info(name, *of) for name, of in side.items()] for side in (inputs, outputs)]
    graph = helper.make_graph([node], "paged", *values)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


class OrtCase:
    """Sequences of one length, in blocks one behind the other; pools take turns. Its owner closes it."""

    def __init__(self, device: CheckDevice, case: TimedCase, block_size: int, pools: int) -> None:
        self._device, self._case = device, case
        self._addresses: list[int] = []
        heads, batch, context = case.heads, len(case.contexts), case.contexts[0]
        rng = np.random.default_rng(4)
        self._new = [
            bf16(rng.standard_normal((batch, n, heads.head_dim), np.float32))
            for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        ]
        self._chunk = bf16(rng.standard_normal(NUM_RANDOM, np.float32))
        names = ("query", "key", "value")
        inputs = {
            name: (BF16, (batch, array[0].size), self._upload(array))
            for name, array in zip(names, self._new, strict=True)
        }
        columns = context // block_size
        table = np.arange(batch * columns, dtype=np.int32).reshape(batch, columns)
        numbers = {
            "cumulative": np.arange(batch + 1, dtype=np.int32),
            "past": np.full(batch, context - 1, np.int32),
            "table": table,
        }
        inputs |= {name: (INT32, array.shape, self._upload(array)) for name, array in numbers.items()}
        self._out = np.full((batch, heads.num_heads * heads.head_dim), 0xFFFF, np.uint16)  # NaN
        self._out_address = self._upload(self._out)
        self._bounds = ort.OrtValue.ortvalue_from_numpy(np.array([1, context], np.int32))
        self._session = open_session(device, paged_attention_model(case, block_size))
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        cache = (batch * columns, block_size, heads.num_kv_heads, heads.head_dim)
        self._bindings = [self._bind(inputs, cache) for _ in range(pools)]

    def _bind(self, inputs: dict, cache: tuple[int, ...]) -> ort.IOBinding:
        binding = self._session.io_binding()
        for name, (kind, shape, address) in inputs.items():
            binding.bind_input(name, "cuda", 0, kind, shape, address)
        for name in ("key_cache", "value_cache"):
            address = self._filled(2 * math.prod(cache))
            binding.bind_input(name, "cuda", 0, BF16, cache, address)
            binding.bind_output(f"{name}_out", "cuda", 0, BF16, cache, address)
        binding.bind_ortvalue_input("bounds", self._bounds)
        binding.bind_output("out", "cuda", 0, BF16, self._out.shape, self._out_address)
        return binding

    def run(self, pool: int) -> None:
        self._session.run_with_iobinding(self._bindings[pool], self._options)

    def error(self) -> float:
        """Of the first sequence: both caches hold the same numbers, and the new token's at the end."""
        self._device.copy_out(self._out_address, self._out)
        heads, context = self._case.heads, self._case.contexts[0]
        shape = (context, heads.num_kv_heads, heads.head_dim)
        stored = np.resize(self._chunk, math.prod(shape)).reshape(shape)
        q, key, value = (wide(each[0]) for each in self._new)
        keys, values = wide(stored), wide(stored)
        keys[-1], values[-1] = key, value
        expected = attention(q, keys, values)
        found = wide(self._out[0]).reshape(expected.shape)
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    def close(self) -> None:
        self._device.wait()
        self._bindings.clear()
        while self._addresses:
            self._device.free(self._addresses.pop())

    def _upload(self, array: np.ndarray) -> int:
        self._addresses.append(self._device.upload(np.ascontiguousarray(array)))
        return self._addresses[-1]

    def _filled(self, num_bytes: int) -> int:
        address = self._device.allocate(num_bytes)
        self._addresses.append(address)
        for begin in range(0, num_bytes, self._chunk.nbytes):
            part = self._chunk[: (num_bytes - begin) // 2]
            if begin:
                self._device.copy_within(address + begin, address, part.nbytes)
            else:
                self._device.copy_in(address, part)
        return address


def wide(numbers: np.ndarray) -> np.ndarray:
    """float64 of bfloat16's bits."""
    return numbers.view(ml_dtypes.bfloat16).astype(np.float64)


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of one token, [num_heads, head_dim], over keys and values [context, num_kv_heads, head_dim]."""
    group = len(q) // keys.shape[1]
    scores = np.einsum("hd,thd->ht", q, np.repeat(keys, group, 1)) / math.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), np.repeat(values, group, 1))
