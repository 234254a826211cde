"""Plans against their definition: every packed row meets every tile that it sees, once."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.executor.cuda.attention_cuts import CHUNK_TOKENS, MAX_CHUNKS
from service.executor.cuda.plan_layout import DECODE_ROWS, WHOLE, PlanLimits
from tests.cuda.plan_cases import LIMITS, balance, plan, prefill_balance, skewed_contexts

LENGTHS = st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 512, 513, 2047, 2048, 2049, 20000]))


@st.composite
def steps(draw: st.DrawFn) -> tuple[PlanLimits, list[int], list[int]]:
    """Limits, and the tokens of each sequence in a step and after it; some are padding."""
    query_lens, context_lens = [], []
    for _ in range(draw(st.integers(1, 12))):
        num_tokens = draw(st.sampled_from([1, 1, 1, 2, 4, 5, 30, 64]))
        is_padding = draw(st.integers(0, 5)) == 0
        query_lens.append(1 if is_padding else num_tokens)
        context_lens.append(0 if is_padding else num_tokens - 1 + draw(LENGTHS))
    limits = PlanLimits(
        num_ranges=draw(st.sampled_from([1, 2, 7, 49])),
        group_size=draw(st.sampled_from([1, 3, 4, 8, 16])),
        max_seqs=12,
        max_tokens=1024,
        max_context=1 << 16,
        tile_tokens=draw(st.sampled_from([32, 64])),
        prefill_rows=draw(st.sampled_from([64, 128])),
        sliding_window=draw(st.sampled_from([0, 0, 1, 100, 4096])),
        resident_prefill_blocks=draw(st.sampled_from([0, 1, 3, 33])),
        is_deterministic=draw(st.booleans()),
    )
    return limits, query_lens, context_lens


def seen(limits: PlanLimits, position: int) -> tuple[int, int]:
    """First and end of what the token at `position` sees."""
    first = max(0, position + 1 - limits.sliding_window) if limits.sliding_window else 0
    return first, position + 1


@given(steps())
def test_items_cover_what_every_row_sees_once_in_tiles(step: tuple[PlanLimits, list[int], list[int]]) -> None:
    limits, query_lens, context_lens = step
    sections, counts = plan(limits, query_lens, context_lens)
    first_tokens = np.cumsum([0, *query_lens])
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rows, items in (
        (DECODE_ROWS, sections.decode_items[: counts.num_decode_items]),
        (limits.prefill_rows, sections.prefill_items[: counts.num_prefill_items]),
    ):
        for seq, first_row, num_tokens, begin, end, _, first_token, context in items.tolist():
            assert (query_lens[seq], first_tokens[seq], context_lens[seq]) == (num_tokens, first_token, context)
            num_rows = num_tokens * limits.group_size
            assert (num_rows <= DECODE_ROWS) == (rows == DECODE_ROWS)
            assert (0, 0) == (first_row % rows, begin % limits.tile_tokens)
            for row in range(first_row, min(first_row + rows, num_rows)):
                covered.setdefault((seq, row), []).append((begin, end))
    for seq, (num_tokens, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for row in range(num_tokens * limits.group_size if context else 0):
            first, end = seen(limits, context - num_tokens + row // limits.group_size)
            pieces = sorted(covered.pop((seq, row)))
            assert all(left[1] == right[0] for left, right in pairwise(pieces))
            assert pieces[0][0] <= first
            assert end <= pieces[-1][1] <= context
    assert covered == {}


@given(steps())
def test_partial_items_have_slots_of_their_own_and_are_merged_in_order(
    step: tuple[PlanLimits, list[int], list[int]],
) -> None:
    limits, query_lens, context_lens = step
    sections, counts = plan(limits, query_lens, context_lens)
    decode = sections.decode_items[: counts.num_decode_items].tolist()
    prefill = sections.prefill_items[: counts.num_prefill_items].tolist()
    pieces: dict[tuple[int, int], list[int]] = {}  # of a sequence's rows from one on, their slots in the order of K
    for seq, row, *_, slot, _, _ in sorted(decode + prefill, key=lambda item: item[3]):
        pieces.setdefault((seq, row), []).append(slot)
    expected = {}
    for (seq, row), slots in pieces.items():
        assert (len(slots) == 1) == (slots == [WHOLE])
        num_rows = query_lens[seq] * limits.group_size
        end = min(num_rows, row + (limits.prefill_rows if num_rows > DECODE_ROWS else DECODE_ROWS))
        for place, first in enumerate(range(row, end, DECODE_ROWS) if len(slots) > 1 else ()):
            rows = (first, min(DECODE_ROWS, end - first))
            expected[sum(query_lens[:seq]), *rows] = [slot + place for slot in slots]
    found = {}
    for slot, num_parts, distance, *rows, first_token, _, _ in sections.merges[: counts.num_merges].tolist():
        found[first_token, *rows] = [slot + distance * part for part in range(num_parts)]
    assert expected == found
    assert list(range(counts.num_slots)) == sorted(slot for slots in found.values() for slot in slots)
    assert counts.num_slots <= limits.max_slots
    assert (counts.num_prefill_items, counts.num_merges) == (sections.num_prefill_items[0], sections.num_merges[0])
    assert counts.num_merges == len(found) <= limits.max_merges


@given(steps())
def test_blocks_share_the_tiles_and_the_long_prefill_items_come_first(
    step: tuple[PlanLimits, list[int], list[int]],
) -> None:
    limits, query_lens, context_lens = step
    sections, counts = plan(limits, query_lens, context_lens)
    assert (0, counts.num_decode_items) == (sections.range_begin[0], sections.range_begin[-1])
    items = sections.decode_items[: counts.num_decode_items]
    tiles = -(-(items[:, 4] - items[:, 3]) // limits.tile_tokens)
    share = -(-int(tiles.sum()) // limits.num_ranges)
    for first, end in zip(sections.range_begin[:-1], sections.range_begin[1:], strict=True):
        assert first <= end
        if not limits.is_deterministic:
            assert int(tiles[first:end].sum()) <= share
            assert int((items[first:end, 5] != WHOLE).sum()) <= 2
    lengths = np.diff(sections.prefill_items[: counts.num_prefill_items, 3:5]).ravel()
    assert (np.diff(lengths) <= 0).all()
    num_cut = np.count_nonzero(sections.prefill_items[: counts.num_prefill_items, 5] != WHOLE)
    assert num_cut <= (0 if limits.is_deterministic else 2 * limits.resident_prefill_blocks)


@given(steps())
def test_deterministic_pieces_of_a_sequence_do_not_depend_on_its_company(
    step: tuple[PlanLimits, list[int], list[int]],
) -> None:
    limits = replace(step[0], is_deterministic=True)
    sections, counts = plan(limits, *step[1:])
    items = sections.decode_items[: counts.num_decode_items]
    for seq, (num_tokens, context) in enumerate(zip(*step[1:], strict=True)):
        alone, alone_counts = plan(limits, [num_tokens], [context])
        pieces = items[items[:, 0] == seq, 3:5]
        assert pieces.tolist() == alone.decode_items[: alone_counts.num_decode_items, 3:5].tolist()
        assert len(pieces) <= MAX_CHUNKS
        assert all(begin % CHUNK_TOKENS == 0 for begin in pieces[1:, 0])
    assert (sections.prefill_items[: counts.num_prefill_items, 5] == WHOLE).all()


def test_a_step_of_padding_has_no_items() -> None:
    sections, counts = plan(LIMITS, [1, 1], [0, 0])
    assert (0, 0, 0, 0) == counts
    assert not sections.range_begin.any()
    assert (0, 0) == (sections.num_merges[0], sections.num_prefill_items[0])


def test_the_largest_steps_fit_their_limits() -> None:
    limits = replace(LIMITS, max_seqs=8, max_tokens=64, max_context=4096)
    for deterministic in (limits, replace(limits, is_deterministic=True)):
        _, counts = plan(deterministic, [8] * 8, [4096] * 8)
        assert counts.num_decode_items == 0
        assert counts.num_prefill_items == (8 if deterministic.is_deterministic else 32), "ranges of 16 tiles"
        assert counts.num_slots <= deterministic.max_slots
        _, counts = plan(deterministic, [1] * 8, [4096] * 8)
        assert counts.num_slots <= deterministic.max_partials
    # 64 tokens of 17 heads each, a token a sequence: no item is full.
    wide = replace(limits, group_size=17, max_seqs=64)
    assert 64 == plan(wide, [1] * 64, [5] * 64)[1].num_prefill_items <= wide.max_prefill_items
    # A cut for each border of the 33 ranges, each of two pieces; all pieces have the rows of a whole item.
    assert (2 * 33 * 8 + 2 * 49, 32 * 8 + 48) == (LIMITS.max_slots, LIMITS.max_merges)


@pytest.mark.parametrize(
    ("contexts", "least"), [([2048] * 64, 0.97), (skewed_contexts(), 0.97), ([8192], 0.85), ([1024] * 8, 0.85)]
)
def test_blocks_are_evenly_loaded(contexts: list[int], least: float) -> None:
    """64 x 2,048 by hand: 2,048 tiles in 49 ranges are 41.8 each, 42 at most, and 4 of 396 blocks idle: 0.985."""
    sections, _ = plan(LIMITS, [1] * len(contexts), contexts)
    assert balance(sections) >= least


@pytest.mark.parametrize(
    ("query_lens", "contexts", "uncut", "least"),
    [
        # 513 tiles in 33 blocks of 16 and 15, or in one of 33
        ([32], [32_800], 0.031, 0.97),
        ([*[1] * 64, 32], [*[2048] * 64, 32_800], 0.031, 0.97),
        ([30], [2078], 0.031, 0.19),  # too short for more than 7 pieces
        ([30] * 20, [10_000] * 20, 0.61, 0.98),
        ([30] * 40, [10_000] * 40, 0.61, 0.98),
        ([30, 64, 20, 100], [30_000, 8000, 500, 3000], 0.06, 0.98),
        ([512], [8192], 0.48, 0.98),
        ([1088], [61_440], 0.53, 0.98),  # 34 items for 33 blocks
        ([32, 2048], [32_800, 2048], 0.10, 0.98),
    ],
)
def test_cut_prefill_items_fill_the_card(
    query_lens: list[int], contexts: list[int], uncut: float, least: float
) -> None:
    assert prefill_balance(plan(replace(LIMITS, resident_prefill_blocks=0), query_lens, contexts)[0]) <= uncut
    assert prefill_balance(plan(LIMITS, query_lens, contexts)[0]) >= least


@pytest.mark.parametrize(
    ("query_lens", "contexts", "least"),
    [
        ([4096], [65_536], 0.97),  # 128 items for 33 blocks are 3.9 rounds
        ([1024], [61_440], 0.96),
        ([2048], [2048], 0.99),
        ([8192], [8192], 0.99),
        ([1024] * 8, [1024] * 8, 0.98),
        ([30] * 64, [4000] * 64, 0.96),
    ],
)
def test_items_that_fill_the_card_stay_whole(query_lens: list[int], contexts: list[int], least: float) -> None:
    sections, counts = plan(LIMITS, query_lens, contexts)
    assert counts.num_slots == 0
    assert prefill_balance(sections) >= least


def test_short_prompts_stay_whole() -> None:
    """Cutting costs about as much as 8 tiles."""
    assert [1, 2] == [plan(LIMITS, [32], [context])[1].num_prefill_items for context in (512, 576)]


def test_determinism_costs_this_much_balance() -> None:
    """Items of 8 tiles, 256 of them in 49 ranges: 6 at most, 5.22 on average; 4 of 396 blocks idle."""
    sections, _ = plan(replace(LIMITS, is_deterministic=True), [1] * 64, [2048] * 64)
    assert 256 / 49 / 6 * 392 / 396 == pytest.approx(balance(sections))


def test_a_plan_with_more_partial_results_than_the_workspace_holds_is_no_plan() -> None:
    """One sequence of 512 tokens has one slot; twice as many tokens are cut in two."""
    limits = replace(LIMITS, max_seqs=1, max_context=CHUNK_TOKENS, sliding_window=0, is_deterministic=True)
    assert 1 == limits.max_partials == limits.max_slots
    plan(limits, [1], [CHUNK_TOKENS])
    with pytest.raises(AssertionError, match="beyond the limits"):
        plan(limits, [1], [2 * CHUNK_TOKENS])
