"""How long the kernels beside attention take: sampling by what is asked of it, rotation and KV write by tokens."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product

import numpy as np

from service.executor.cuda.kernels import SAMPLE_KERNELS, Scalar
from service.executor.cuda.launch import LoadedKernel
from tests.cuda.gpu_check.attention_cases import HEADS
from tests.cuda.gpu_check.attention_step import BLOCK_SIZE, bf16
from tests.cuda.gpu_check.ceilings import read_rate
from tests.cuda.gpu_check.compilation import kernel_config
from tests.cuda.gpu_check.device import CheckDevice
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import time_graph
from tests.cuda.sampling_rows import sample_grid, sample_workspace

VOCAB_SIZE = {"sim": 1_003, "cuda": 128_256}
BATCHES = {"sim": (2,), "cuda": (1, 16, 64, 256)}
NUM_TOKENS = {"sim": (3,), "cuda": (1, 64, 256, 2048, 8192)}
READ_BYTES = {"sim": 1 << 18, "cuda": 1 << 30}
LOGIT_BYTES = 2
# Temperature, top_k, top_p of all rows.
KINDS = {
    "greedy": (0.0, 0, 1.0),
    "drawn": (1.0, 0, 1.0),
    "top-p 0.9": (1.0, 0, 0.9),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9),
}
Launch = tuple[str, tuple[int, int]]
Argument = np.ndarray | int | float | None


def kernel_times(device: CheckDevice) -> Iterator[Row]:
    """Launches of a replayed graph, one after the other.

    Bytes are those of the logits that every row is read for, once, or twice for a filter; what they are compared with
    was read from memory, while logits that were just written may lie in the L2 cache.
    """
    rate = read_rate(device, READ_BYTES[device.name])
    vocab_size = VOCAB_SIZE[device.name]
    num_blocks = device.num_sms * device.blocks_per_sm(_kernels(device)["sample_scan"])
    for num_rows, (kind, asked) in product(BATCHES[device.name], KINDS.items()):
        launches = [(name, sample_grid(name, num_rows, vocab_size, num_blocks)) for name in SAMPLE_KERNELS]
        row, seconds = _row(device, f"{num_rows} rows, {kind}", launches, sampling(device, num_rows, asked))
        num_bytes = num_rows * vocab_size * LOGIT_BYTES * (2 if asked[1:] != (0, 1.0) else 1)
        yield {**row, "MB": round(num_bytes / 1e6, 2), "of read only": f"{num_bytes / seconds / rate:.3f}"}
    for num_tokens in NUM_TOKENS[device.name]:
        heads = HEADS[0].num_heads + 2 * HEADS[0].num_kv_heads
        grid = (num_tokens, -(-heads // 4))
        launches = [("rope_kv_write", grid)]
        yield _row(device, f"{num_tokens} tokens, {HEADS[0]}", launches, rotation(num_tokens))[0]


def sampling(device: CheckDevice, num_rows: int, asked: tuple[float, int, float]) -> list[Argument]:
    """As the product launches it for rows that edit nothing and report no log-probabilities."""
    temperature, top_k, top_p = asked
    vocab_size = VOCAB_SIZE[device.name]
    logits = bf16(3 * np.random.default_rng(1).standard_normal((num_rows, vocab_size), np.float32))
    columns = [(temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (0.0, np.float32)]
    arrays = [np.full(num_rows, value, dtype) for value, dtype in columns]
    seeds = [np.arange(num_rows, dtype=np.int64), np.zeros(num_rows, np.int32)]
    token, workspace = np.full(num_rows, -7, np.int32), sample_workspace(num_rows, vocab_size, 0)
    return [logits, *arrays, *seeds, *[None] * 9, token, None, None, None, workspace, vocab_size, 0]


def rotation(num_tokens: int) -> list[Argument]:
    heads, rng = HEADS[0], np.random.default_rng(2)
    shape = (num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    angles = rng.standard_normal((2, num_tokens, heads.head_dim // 2), np.float32)
    places = np.arange(num_tokens, dtype=np.int32)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    kv = np.zeros((num_blocks, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim), np.uint16)
    q = np.zeros((num_tokens, heads.num_heads, heads.head_dim), np.uint16)
    inputs = [bf16(rng.standard_normal(shape, np.float32)), places, places, angles[0], angles[1], None, None, q, kv]
    return [*inputs, heads.num_heads, heads.num_kv_heads, heads.head_dim // 2, 1e-5, 1.0, 1.0]


def _row(device: CheckDevice, case: str, launches: list[Launch], arguments: list[Argument]) -> tuple[Row, float]:
    """And the seconds of all launches, which take the same arguments."""
    kernels = _kernels(device)
    with ExitStack() as owned:
        cells = []
        for each in arguments:
            if isinstance(each, np.ndarray):
                address = device.upload(np.ascontiguousarray(each))
                owned.callback(device.free, address)
                cells.append(ctypes.c_void_p(address))
            elif each is None:
                cells.append(ctypes.c_void_p(0))
            else:
                cells.append(ctypes.c_float(each) if isinstance(each, float) else ctypes.c_int32(each))

        def enqueue(_: int) -> None:
            for name, grid in launches:
                kernel = kernels[name]
                size = (kernel.block_threads, 1, 1)
                device.launch(kernel.function, (*grid, 1), size, kernel.shared_bytes, cells)

        timing = time_graph(device, enqueue, 1)
    return {"kernel": " + ".join(name for name, _ in launches), "case": case, **timing.cells()}, timing.best


def _kernels(device: CheckDevice) -> Mapping[str, LoadedKernel]:
    return device.kernels(kernel_config(device, Scalar.BF16, HEADS[0].head_dim, BLOCK_SIZE, logit=Scalar.BF16))
