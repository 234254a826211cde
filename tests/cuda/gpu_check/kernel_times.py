"""How long the kernels beside attention take: sampling by what is asked of it, rotation and KV write by tokens."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

import numpy as np

from service.executor.cuda.kernels import Scalar
from service.executor.cuda.launch import LoadedKernel
from tests.cuda.gpu_check.attention_cases import HEADS
from tests.cuda.gpu_check.attention_step import BLOCK_SIZE, bf16
from tests.cuda.gpu_check.compilation import kernel_config
from tests.cuda.gpu_check.device import CheckDevice
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import time_graph

VOCAB_SIZE = {"sim": 1_003, "cuda": 128_256}
BATCHES = {"sim": (2,), "cuda": (1, 16, 64, 256)}
NUM_TOKENS = {"sim": (3,), "cuda": (1, 64, 256, 2048, 8192)}
# Temperature, top_k, top_p of all rows: one pass, one more for the race, three more for each search.
KINDS = {
    "greedy": (0.0, 0, 1.0),
    "drawn": (1.0, 0, 1.0),
    "top-p 0.9": (1.0, 0, 0.9),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9),
}
Argument = np.ndarray | int | float | None


def kernel_times(device: CheckDevice) -> Iterator[Row]:
    """Launches of a replayed graph, one after the other."""
    for num_rows, (kind, asked) in product(BATCHES[device.name], KINDS.items()):
        yield _row(device, "sample_rows", f"{num_rows} rows, {kind}", (num_rows, 1), sampling(device, num_rows, asked))
    for num_tokens in NUM_TOKENS[device.name]:
        heads = HEADS[0].num_heads + 2 * HEADS[0].num_kv_heads
        grid = (num_tokens, -(-heads // 4))
        yield _row(device, "rope_kv_write", f"{num_tokens} tokens, {HEADS[0]}", grid, rotation(num_tokens))


def sampling(device: CheckDevice, num_rows: int, asked: tuple[float, int, float]) -> list[Argument]:
    """As the product launches it for rows that edit nothing and report no log-probabilities."""
    temperature, top_k, top_p = asked
    vocab_size = VOCAB_SIZE[device.name]
    logits = bf16(3 * np.random.default_rng(1).standard_normal((num_rows, vocab_size), np.float32))
    columns = [(temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (0.0, np.float32)]
    arrays = [np.full(num_rows, value, dtype) for value, dtype in columns]
    seeds = [np.arange(num_rows, dtype=np.int64), np.zeros(num_rows, np.int32)]
    token = np.full(num_rows, -7, np.int32)
    return [logits, *arrays, *seeds, *[None] * 9, token, None, None, None, vocab_size, 0]


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


def _row(device: CheckDevice, name: str, case: str, grid: tuple[int, int], arguments: list[Argument]) -> Row:
    config = kernel_config(device, Scalar.BF16, HEADS[0].head_dim, BLOCK_SIZE, logit=Scalar.BF16)
    kernel: LoadedKernel = device.kernels(config)[name]
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
        size = (kernel.block_threads, 1, 1)
        timing = time_graph(
            device, lambda _: device.launch(kernel.function, (*grid, 1), size, kernel.shared_bytes, cells), 1
        )
    return {"kernel": name, "case": case, **timing.cells()}
