"""FlashInfer over the same pages: decode with and without tensor cores, prefill.

Its kernels are compiled when they are first used, which takes nvcc, and `libcuda.so` on LIBRARY_PATH.

python -m tests.cuda.gpu_check.peers.flashinfer_steps    compiles them beforehand, which may take minutes
"""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from tests.cuda.gpu_check.attention_cases import HEADS, TimedCase, decode_case
from tests.cuda.gpu_check.device import CheckDevice, NotRunError
from tests.cuda.gpu_check.peers.torch_case import (
    PAGE,
    TorchCase,
    TorchClock,
    checked,
    import_torch,
    peer_decode_cases,
    peer_prefill_cases,
    time_peer,
)
from tests.cuda.gpu_check.report import Row

WORKSPACE_BYTES = 256 << 20
DECODERS = (("flashinfer", False), ("flashinfer tensor cores", True))


def times(device: CheckDevice) -> Iterator[Row]:
    torch = import_torch(device)
    try:
        flashinfer = import_module("flashinfer")
    except Exception as error:  # it looks for compilers and cards when it is imported
        raise NotRunError(f"flashinfer cannot be imported: {type(error).__name__}: {error}") from error
    clock = TorchClock(torch)
    if not clock.is_gpu:
        raise NotRunError("flashinfer needs a GPU")
    return checked(_rows(clock, flashinfer))


def _rows(clock: TorchClock, flashinfer: ModuleType) -> Iterator[Row]:
    cases = [case for case in peer_decode_cases() if case.heads == HEADS[0]]  # every head dimension is compiled anew
    for peer, is_tensor in DECODERS:
        for case in cases:
            yield _timed(
                clock,
                TorchCase(clock, case),
                peer,
                lambda made, is_tensor=is_tensor: decode(flashinfer, made, is_tensor),
            )
    for case in peer_prefill_cases():
        yield _timed(clock, TorchCase(clock, case), "flashinfer", lambda made: prefill(flashinfer, made))


def _timed(clock: TorchClock, made: TorchCase, peer: str, plan) -> Row:
    try:
        run = plan(made)
    except Exception as error:  # of a compiler or of the planner
        text = str(error).strip() or "no message"
        return {
            "case": made.case.name,
            "peer": peer,
            "not timed": f"{type(error).__name__}: {text.splitlines()[0][:200]}",
        }
    return time_peer(clock, made, peer, run)


def decode(flashinfer: ModuleType, made: TorchCase, is_tensor: bool):
    """One plan for all pools, which share a block table."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(made), "HND", use_tensor_cores=is_tensor)
    heads, bfloat16 = made.case.heads, made.torch.bfloat16
    sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, PAGE)
    wrapper.plan(*pages(made), *sizes, q_data_type=bfloat16, kv_data_type=bfloat16)
    out = made.torch.empty_like(made.q)
    return lambda pool: wrapper.run(made.q, made.kv[pool], out=out)


def prefill(flashinfer: ModuleType, made: TorchCase):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(made), "HND")
    heads, bfloat16 = made.case.heads, made.torch.bfloat16
    starts = made.torch.tensor(made.case.starts.tolist(), dtype=made.torch.int32, device=made.q.device)
    sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, PAGE)
    wrapper.plan(starts, *pages(made), *sizes, causal=True, q_data_type=bfloat16, kv_data_type=bfloat16)
    out = made.torch.empty_like(made.q)
    return lambda pool: wrapper.run(made.q, made.kv[pool], out=out)


def pages(made: TorchCase):
    """int32: where each sequence's pages begin, the pages, and the tokens in each sequence's last one."""
    torch, place = made.torch, made.q.device
    counts = torch.tensor([0, *map(len, made.pages)])
    last = [(context - 1) % PAGE + 1 for context in made.case.contexts]
    begin = torch.cumsum(counts, 0).to(torch.int32).to(place)
    return begin, torch.cat(made.pages), torch.tensor(last, dtype=torch.int32, device=place)


def _workspace(made: TorchCase):
    return made.torch.zeros(WORKSPACE_BYTES, dtype=made.torch.uint8, device=made.q.device)


def main() -> None:
    """A small case of each kind."""
    import torch

    clock, flashinfer = TorchClock(torch), import_module("flashinfer")
    for peer, is_tensor in DECODERS:
        made = TorchCase(clock, decode_case(1, 512, HEADS[0]))
        print(_timed(clock, made, peer, lambda made, is_tensor=is_tensor: decode(flashinfer, made, is_tensor)))
    made = TorchCase(clock, TimedCase("prefill", (512,), (512,), HEADS[0]))
    print(_timed(clock, made, "flashinfer", lambda made: prefill(flashinfer, made)))


if __name__ == "__main__":
    main()
