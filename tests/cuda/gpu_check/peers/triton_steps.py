"""A short paged decode kernel of our own in Triton: what 60 lines reach.

Triton's interpreter multiplies no bfloat16: without a GPU the kernel is right in float16 only.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from tests.cuda.gpu_check.device import CheckDevice, NotRunError
from tests.cuda.gpu_check.peers.torch_case import (
    PAGE,
    TorchCase,
    TorchClock,
    checked,
    chosen_cases,
    import_torch,
    peer_decode_cases,
    time_peer,
)
from tests.cuda.gpu_check.report import Row

TILE = 64
PROGRAMS = 4 * 132  # that there shall be at least, of any card


def times(device: CheckDevice) -> Iterator[Row]:
    clock = TorchClock(import_torch(device))
    try:
        kernels = import_module("tests.cuda.gpu_check.peers.triton_kernel")
    except Exception as error:  # it looks for a driver when it is imported
        raise NotRunError(f"triton cannot be imported: {type(error).__name__}: {error}") from error
    return checked(_rows(clock, kernels))


def _rows(clock: TorchClock, kernels: ModuleType) -> Iterator[Row]:
    for case in chosen_cases(peer_decode_cases(), clock.is_gpu):
        if case.heads.head_dim & (case.heads.head_dim - 1):
            continue  # Triton's blocks are powers of two
        made = TorchCase(clock, case)
        step = TritonCase(kernels, made)
        yield time_peer(clock, made, "triton", step.run)


def num_splits(num_groups: int, context: int) -> int:
    """Of a sequence: enough for all multiprocessors, each of a tile at least."""
    return max(1, min(-(-PROGRAMS // num_groups), -(-context // TILE)))


class TritonCase:
    def __init__(self, kernels: ModuleType, made: TorchCase) -> None:
        torch, case, heads = made.torch, made.case, made.case.heads
        self._kernels, self._made = kernels, made
        place = made.q.device
        self._lengths = torch.tensor(case.contexts, dtype=torch.int32, device=place)
        self._splits = num_splits(len(case.contexts) * heads.num_kv_heads, max(case.contexts))
        shape = (len(case.contexts), heads.num_kv_heads, self._splits, 16)
        self._part = torch.empty(*shape, heads.head_dim, device=place)
        self._lse = torch.empty(shape, device=place)
        self._out = torch.empty_like(made.q)

    def run(self, pool: int):
        made, heads = self._made, self._made.case.heads
        group = heads.num_heads // heads.num_kv_heads
        kv = made.kv[pool]
        scale = math.log2(math.e) / math.sqrt(heads.head_dim)
        grid = (len(made.case.contexts), heads.num_kv_heads)
        numbers = (made.columns, kv.stride(0), kv.stride(2), scale, self._splits)
        arrays = (made.q, kv[:, 0], kv[:, 1], made.table, self._lengths, self._part, self._lse)
        self._kernels.attend[(*grid, self._splits)](
            *arrays, *numbers, GROUP=group, DIM=heads.head_dim, PAGE=PAGE, TILE=TILE
        )
        power = 1 << (self._splits - 1).bit_length()
        self._kernels.merge[(*grid, group)](
            self._part, self._lse, self._out, self._splits, GROUP=group, DIM=heads.head_dim, SPLITS=power
        )
        return self._out
