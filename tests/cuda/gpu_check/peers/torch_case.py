"""A timed case in torch tensors, what its answer should be, and torch's clock behind the face of a device."""

import time
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from tests.cuda.gpu_check.attention_cases import (
    DECODE_BATCHES,
    HEADS,
    TimedCase,
    decode_case,
    prefill_cases,
    small_cases,
)
from tests.cuda.gpu_check.attention_times import ROTATED_BYTES, num_pools
from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import Timing, time_calls, time_graph

PAGE = 16
MAX_ERROR = 0.02  # relative, in the 2-norm: bfloat16 with scores that others round too
CONTEXTS = (2048, 512, 8192)


def peer_decode_cases() -> list[TimedCase]:
    cases = [decode_case(batch, context, HEADS[0]) for context in CONTEXTS for batch in DECODE_BATCHES]
    return [*cases, *(decode_case(64, 2048, heads) for heads in HEADS[1:])]


def chosen_cases(cases: list[TimedCase], on_gpu: bool) -> list[TimedCase]:
    return cases if on_gpu else small_cases(cases)


def peer_prefill_cases() -> list[TimedCase]:
    return prefill_cases()


def import_torch(device: CheckDevice) -> ModuleType:
    """Raises NotRunError where it is not installed, or cannot use the GPU that the check runs on."""
    try:
        import torch
    except ImportError as error:
        raise NotRunError(f"torch cannot be imported: {error}") from error
    if device.name == "cuda" and not torch.cuda.is_available():
        raise NotRunError(f"torch {torch.__version__} finds no GPU")
    return torch


class TorchClock:
    """Torch's current GPU; without one, wall-clock times of small cases."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.is_gpu = torch.cuda.is_available()
        self.name = "cuda" if self.is_gpu else "sim"
        self.place = "cuda" if self.is_gpu else "cpu"

    def seconds(self, enqueue: Callable[[int], object], num_calls: int) -> float:
        """Seconds for calls of `enqueue` with 0, 1, ..., divided by their number."""
        if not self.is_gpu:
            started = time.perf_counter()
            for call in range(num_calls):
                enqueue(call)
            return (time.perf_counter() - started) / num_calls
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in range(num_calls):
            enqueue(call)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / num_calls

    def capture(self, enqueue: Callable[[int], object], num_calls: int) -> Callable[[], None]:
        """A function that replays a CUDA graph of the calls."""
        if not self.is_gpu:
            return lambda: [enqueue(call) for call in range(num_calls)] and None
        for call in range(3):  # a capture allows no first call
            enqueue(call)
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for call in range(num_calls):
                enqueue(call)
        return graph.replay


class TorchCase:
    """Queries, pools of pages that take turns, and a block table that all pools share."""

    def __init__(self, clock: TorchClock, case: TimedCase) -> None:
        torch = clock.torch
        self.case, self.torch = case, torch
        heads = case.heads
        counts = [-(-context // PAGE) for context in case.contexts]
        pool_bytes = sum(counts) * PAGE * case.token_bytes
        free, l2_bytes = (torch.cuda.mem_get_info()[0], 50 << 20) if clock.is_gpu else (1 << 28, 1 << 16)
        self.num_pools = num_pools(pool_bytes, ROTATED_BYTES[clock.name], l2_bytes, free // 2)
        generator = torch.Generator(clock.place).manual_seed(1)
        options = {"generator": generator, "device": clock.place, "dtype": torch.bfloat16}
        self.q = torch.randn(case.num_tokens, heads.num_heads, heads.head_dim, **options)
        shape = (sum(counts), 2, heads.num_kv_heads, PAGE, heads.head_dim)
        self.kv = [torch.randn(*shape, **options) for _ in range(self.num_pools)]
        order = torch.from_numpy(np.random.default_rng(2).permutation(sum(counts)).astype(np.int32)).to(clock.place)
        self.pages = list(order.split(counts))  # of each sequence
        self.columns = max(counts)
        self.table = torch.zeros(len(counts), self.columns, dtype=torch.int32, device=clock.place)
        for row, mine in zip(self.table, self.pages, strict=True):
            row[: len(mine)] = mine

    def dense(self, pool: int, which: int, seq: int):
        """Keys (0) or values (1) of a sequence: [num_kv_heads, context, head_dim]."""
        pages = self.kv[pool][self.pages[seq].long(), which]  # [pages, heads, PAGE, dim]
        heads = pages.permute(1, 0, 2, 3).reshape(self.case.heads.num_kv_heads, -1, self.case.heads.head_dim)
        return heads[:, : self.case.contexts[seq]]

    def error(self, out, pool: int) -> float:
        """Of the last sequence's last tokens, against attention from its definition in float32."""
        torch, case = self.torch, self.case
        seq, q_len = len(case.contexts) - 1, min(case.q_lens[-1], 64)
        q = self.q[-q_len:].float().permute(1, 0, 2)  # [heads, q_len, dim]
        group = case.heads.num_heads // case.heads.num_kv_heads
        k, v = (self.dense(pool, which, seq).float().repeat_interleave(group, 0) for which in (0, 1))
        scores = q @ k.transpose(1, 2) * case.heads.head_dim**-0.5
        at = torch.arange(case.contexts[seq], device=q.device)
        seen = at[None] <= at[-q_len:, None]
        expected = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v
        found = out[-q_len:].float().permute(1, 0, 2)
        return float((found - expected).norm() / expected.norm())


Call = Callable[[int], object]


def time_peer(clock: TorchClock, made: TorchCase, peer: str, call: Call) -> Row:
    """A row; `call` takes a pool and yields [num_tokens, num_heads, head_dim]. An error goes into the row."""
    row: Row = {"case": made.case.name, "peer": peer}
    try:
        error = made.error(call(0), 0)
        row["error"] = f"{error:.1e}"
        if not error <= MAX_ERROR:
            return row | {"not timed": "its answer is wrong"}
        timing, how = _timed(clock, lambda index: call(index % made.num_pools), made.num_pools)
        return row | timing.cells() | {"launched": how, "GB/s": round(made.case.num_bytes / timing.best / 1e9, 1)}
    except Exception as error:  # whatever a library raises; the next case may still run
        said = (str(error).strip() or "no message").splitlines()[0]
        return row | {"not timed": f"{type(error).__name__}: {said[:200]}"}


def _timed(clock: TorchClock, call: Call, num_calls: int) -> tuple[Timing, str]:
    try:
        return time_graph(clock, call, num_calls), "graph"
    except Exception:  # it cannot be captured
        if clock.is_gpu:
            clock.torch.cuda.synchronize()
        return time_calls(clock, call, max(num_calls, 4)), "eager"


def checked(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows. Raises StepFailedError if not one was timed."""
    num_rows = num_timed = 0
    last = ""
    for row in rows:
        yield row
        num_rows += 1
        num_timed += "us" in row
        last = str(row.get("not timed", last))
    if not num_timed:
        raise StepFailedError(f"none of {num_rows} cases could be timed: {last}")
