"""Steps to be planned, and how evenly a plan spreads them."""

import heapq

import numpy as np

from service.executor.cuda.attention_plan import AttentionPlanner
from service.executor.cuda.plan_layout import PlanCounts, PlanLayout, PlanLimits, PlanSections

NUM_SMS = 132
BLOCKS_PER_SM = 3
PREFILL_BLOCKS_PER_SM = 2
NUM_KV_HEADS = 8
LIMITS = PlanLimits(
    num_ranges=NUM_SMS * BLOCKS_PER_SM // NUM_KV_HEADS,
    group_size=4,
    max_seqs=256,
    max_tokens=8192,
    max_context=1 << 17,
    prefill_rows=128,
    resident_prefill_blocks=NUM_SMS * PREFILL_BLOCKS_PER_SM // NUM_KV_HEADS,
)


def plan(limits: PlanLimits, query_lens: list[int], context_lens: list[int]) -> tuple[PlanSections, PlanCounts]:
    layout = PlanLayout.of(limits, has_prefill=True)
    planner = AttentionPlanner(limits, layout, np.full(layout.size, -99, np.int32))
    cu_seqlens = np.cumsum([0, *query_lens]).astype(np.int32)
    return planner.sections, planner.fill(cu_seqlens, np.array(context_lens, np.int32))


def balance(sections: PlanSections) -> float:
    """Mean tiles of a resident block over the most tiles of one."""
    begin, end = sections.decode_items[:, 3], sections.decode_items[:, 4]
    tiles = -(-(end - begin) // LIMITS.tile_tokens)
    loads = [
        int(tiles[first:last].sum())
        for first, last in zip(sections.range_begin[:-1], sections.range_begin[1:], strict=True)
    ]
    return sum(loads) * NUM_KV_HEADS / (NUM_SMS * BLOCKS_PER_SM) / max(loads)


def prefill_balance(sections: PlanSections) -> float:
    """Mean tiles of a resident block over those until the last one is done, each taking the next item that is left."""
    begin, end = sections.prefill_items[: sections.num_prefill_items[0], 3:5].T
    tiles = np.repeat(-(-(end - begin) // 64), NUM_KV_HEADS).tolist()  # in the order of blocks: x, the head, first
    done = [0] * (NUM_SMS * PREFILL_BLOCKS_PER_SM)
    for each in tiles:
        heapq.heapreplace(done, done[0] + each)
    return sum(tiles) / len(done) / max(done)


def skewed_contexts(num_seqs: int = 64) -> list[int]:
    """From 1 to 32,768 tokens, evenly on a logarithmic scale."""
    return np.rint(np.geomspace(1, 32768, num_seqs)).astype(int).tolist()
