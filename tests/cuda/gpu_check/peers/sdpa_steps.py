"""torch's scaled_dot_product_attention over dense keys and values, by backend."""

from collections.abc import Iterator

from tests.cuda.gpu_check.device import CheckDevice
from tests.cuda.gpu_check.peers.torch_case import (
    TorchCase,
    TorchClock,
    checked,
    chosen_cases,
    import_torch,
    peer_decode_cases,
    peer_prefill_cases,
    time_peer,
)
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import time_calls

MATRIX = {"sim": 64, "cuda": 8192}


def times(device: CheckDevice) -> Iterator[Row]:
    clock = TorchClock(import_torch(device))
    return checked(_rows(clock))


def matmul(device: CheckDevice) -> Iterator[Row]:
    """A product of bfloat16 matrices, beside ONNX Runtime's."""
    clock = TorchClock(import_torch(device))
    size = MATRIX[clock.name]
    a, b = (clock.torch.randn(size, size, dtype=clock.torch.bfloat16, device=clock.place) for _ in range(2))
    out = clock.torch.empty_like(a)
    timing = time_calls(clock, lambda _: clock.torch.mm(a, b, out=out), 2)
    yield {"product": f"{size}^3 bf16", **timing.cells(), "TFLOP/s": round(2 * size**3 / timing.best / 1e12, 1)}


def _rows(clock: TorchClock) -> Iterator[Row]:
    from torch.nn.attention import SDPBackend

    backends = {"sdpa": SDPBackend.FLASH_ATTENTION, "sdpa cuDNN": SDPBackend.CUDNN_ATTENTION}
    cases = chosen_cases(peer_prefill_cases(), clock.is_gpu) + chosen_cases(peer_decode_cases(), clock.is_gpu)
    for case in cases:
        if case.is_ragged:
            continue
        made = TorchCase(clock, case)
        dense = DenseCase(clock, made)
        for peer, backend in backends.items() if clock.is_gpu else [("sdpa", SDPBackend.MATH)]:
            yield time_peer(clock, made, peer, lambda pool, dense=dense, backend=backend: dense.run(pool, backend))
        del made, dense


class DenseCase:
    """Sequences of one length; keys and values are laid out densely once, for as many pools as fit."""

    def __init__(self, clock: TorchClock, made: TorchCase) -> None:
        torch = clock.torch
        self._torch, self._made = torch, made
        seqs = range(len(made.case.contexts))
        self._kv = [
            tuple(torch.stack([made.dense(pool, which, seq) for seq in seqs]) for which in (0, 1))
            for pool in range(made.num_pools)
        ]
        heads, q_len = made.case.heads, made.case.q_lens[0]
        self._q = made.q.reshape(len(seqs), q_len, heads.num_heads, heads.head_dim).transpose(1, 2)
        self._mask = None
        if q_len > 1:
            from torch.nn.attention.bias import causal_lower_right

            self._mask = causal_lower_right(q_len, made.case.contexts[0])

    def run(self, pool: int, backend: object):
        from torch.nn.attention import sdpa_kernel

        k, v = self._kv[pool]
        with sdpa_kernel([backend]):
            out = self._torch.nn.functional.scaled_dot_product_attention(
                self._q, k, v, attn_mask=self._mask, enable_gqa=True
            )
        return out.transpose(1, 2).reshape(self._made.q.shape)
