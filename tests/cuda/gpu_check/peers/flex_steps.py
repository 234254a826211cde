"""torch's flex_attention, compiled, over pages: a block mask that names physical pages."""

import inspect
from collections.abc import Iterator

from tests.cuda.gpu_check.device import CheckDevice
from tests.cuda.gpu_check.peers.torch_case import (
    TorchCase,
    TorchClock,
    checked,
    chosen_cases,
    import_torch,
    peer_decode_cases,
    time_peer,
)
from tests.cuda.gpu_check.report import Row

FLEX_PAGE = 128  # tokens; a multiple of what its kernels take at a time
NUM_CASES = 5  # each shape is compiled anew


def times(device: CheckDevice) -> Iterator[Row]:
    clock = TorchClock(import_torch(device))
    return checked(_rows(clock))


def _rows(clock: TorchClock) -> Iterator[Row]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = clock.torch.compile(flex_attention, dynamic=False)
    for case in chosen_cases(peer_decode_cases(), clock.is_gpu)[:NUM_CASES]:
        made = TorchCase(clock, case)
        paged = FlexCase(clock, made)
        yield time_peer(clock, made, "flex_attention", lambda pool, paged=paged: paged.run(compiled, pool))


class FlexCase:
    """One query a sequence; keys and values of all sequences lie in one row of pages."""

    def __init__(self, clock: TorchClock, made: TorchCase) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        torch = clock.torch
        self._made = made
        contexts = made.case.contexts
        counts = [-(-context // FLEX_PAGE) for context in contexts]
        num_pages, num_seqs = sum(counts), len(counts)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        self._pages = [mine.to(clock.place) for mine in order.split(counts)]
        self._kv = [self._laid_out(pool, num_pages) for pool in range(made.num_pools)]
        kinds = torch.zeros(2, num_seqs, 1, 1, dtype=torch.int32)  # pages with a mask, pages without
        indices = torch.zeros(2, num_seqs, 1, 1, num_pages, dtype=torch.int32)
        for seq, (context, pages) in enumerate(zip(contexts, order.split(counts), strict=True)):
            num_full = context // FLEX_PAGE
            kinds[1, seq], kinds[0, seq] = num_full, len(pages) - num_full
            indices[1, seq, 0, 0, :num_full] = pages[:num_full]
            indices[0, seq, 0, 0, : len(pages) - num_full] = pages[num_full:]
        first = torch.full((num_seqs, num_pages), 1 << 30, dtype=torch.int64)  # position that a page begins with
        for seq, pages in enumerate(order.split(counts)):
            first[seq, pages.long()] = FLEX_PAGE * torch.arange(len(pages))
        kinds, indices, first = (each.to(clock.place) for each in (kinds, indices, first))
        lengths = torch.tensor(contexts, device=clock.place)

        def is_seen(seq, head, query, at):
            return first[seq, at // FLEX_PAGE] + at % FLEX_PAGE < lengths[seq]

        arguments = {"BLOCK_SIZE": (128, FLEX_PAGE), "mask_mod": is_seen, "seq_lengths": (1, num_pages * FLEX_PAGE)}
        if "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters:
            arguments["compute_q_blocks"] = False
        self._mask = BlockMask.from_kv_blocks(kinds[0], indices[0], kinds[1], indices[1], **arguments)

    def _laid_out(self, pool: int, num_pages: int):
        """[2, 1, num_kv_heads, num_pages * FLEX_PAGE, head_dim]"""
        heads, torch = self._made.case.heads, self._made.torch
        shape = (2, 1, heads.num_kv_heads, num_pages, FLEX_PAGE, heads.head_dim)
        kv = torch.zeros(shape, dtype=torch.bfloat16, device=self._made.q.device)
        for seq, pages in enumerate(self._pages):
            for which in (0, 1):
                tokens = self._made.dense(pool, which, seq)
                padded = torch.nn.functional.pad(tokens, (0, 0, 0, len(pages) * FLEX_PAGE - tokens.shape[1]))
                kv[which, 0, :, pages.long()] = padded.reshape(heads.num_kv_heads, len(pages), FLEX_PAGE, -1)
        return kv.flatten(3, 4)

    def run(self, attention, pool: int):
        k, v = self._kv[pool]
        q = self._made.q[:, :, None]  # [num_seqs, num_heads, 1, head_dim]
        return attention(q, k, v, block_mask=self._mask, enable_gqa=True)[:, :, 0]
