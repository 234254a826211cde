"""BatchState: rows come, move and go with all their columns."""

import numpy as np
import pytest

from service.core.batch_state import NO_TOKEN, BatchState
from service.core.types import Request, SamplingParams


def make_batch(max_num_seqs: int = 6) -> BatchState:
    return BatchState(max_num_seqs, max_model_len=16, block_size=4)


def add(batch: BatchState, seq_id: int, num_tokens: int, *, num_computed: int = 0, **sampling: object) -> int:
    """Add a row whose tokens are seq_id * 100 + position, with the blocks seq_id * 10 + n."""
    tokens = (seq_id * 100 + np.arange(num_tokens)).astype(np.int32)
    params = SamplingParams(max_tokens=4, temperature=seq_id / 8, top_k=seq_id, seed=seq_id, **sampling)  # type: ignore[arg-type]
    row = batch.add_row(Request(seq_id, tokens, params, (seq_id,)), tokens, rank=seq_id, tenant_slot=seq_id + 1)
    batch.admitted_step[row] = seq_id + 2
    batch.has_ended[row], batch.has_failed[row] = seq_id % 2, seq_id % 4 == 1
    num_blocks = -(-num_computed // 4)
    batch.num_computed_tokens[row] = num_computed
    batch.num_blocks[row] = num_blocks
    batch.block_table[row, :num_blocks] = seq_id * 10 + np.arange(num_blocks)
    return row


def check_row(batch: BatchState, row: int, seq_id: int, num_tokens: int, num_computed: int) -> None:
    """Every column of `row` belongs to `seq_id`."""
    num_blocks = -(-num_computed // 4)
    assert batch.seq_ids[row] == seq_id
    assert batch.token_ids[row, :num_tokens].tolist() == [seq_id * 100 + p for p in range(num_tokens)]
    assert (batch.num_prompt_tokens[row], batch.num_tokens[row]) == (num_tokens, num_tokens)
    assert batch.num_computed_tokens[row] == num_computed
    assert batch.num_blocks[row] == num_blocks
    table = [seq_id * 10 + n for n in range(num_blocks)]
    assert batch.block_table[row].tolist() == table + [0] * (4 - num_blocks)
    assert (batch.temperature[row], batch.top_k[row], batch.seed[row], batch.rank[row]) == (
        seq_id / 8,
        seq_id,
        seq_id,
        seq_id,
    )
    assert (batch.tenant_slot[row], batch.admitted_step[row]) == (seq_id + 1, seq_id + 2)
    assert (batch.has_ended[row], batch.has_failed[row]) == (seq_id % 2, seq_id % 4 == 1)
    assert batch.min_num_tokens[row] == num_tokens
    assert batch.max_num_tokens[row] == min(num_tokens + 4, 16)
    assert batch.stop_token_ids[:, row].tolist() == [seq_id]
    assert (batch.requests[row].eos_token_ids, batch.requests[row].sampling.seed) == ((seq_id,), seq_id)


def check_empty(batch: BatchState, row: int) -> None:
    assert batch.seq_ids[row] == -1
    assert batch.num_blocks[row] == 0
    assert batch.block_table[row].tolist() == [0, 0, 0, 0]
    assert batch.requests[row] is None
    assert not batch.has_ended[row] and not batch.has_failed[row]


def test_add_row_fills_every_column_and_holds_no_block():
    batch = make_batch()
    assert add(batch, 3, 5) == 0
    assert batch.num_rows == 1
    check_row(batch, 0, 3, 5, 0)


def test_known_tokens_after_a_preemption_keep_the_original_prompt_length():
    batch = make_batch()
    request = Request(7, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=9, min_tokens=2))
    row = batch.add_row(request, np.array([1, 2, 3, 8, 9], np.int32))
    assert batch.num_prompt_tokens[row] == 3
    assert batch.num_tokens[row] == 5
    assert (batch.min_num_tokens[row], batch.max_num_tokens[row]) == (5, 12)


@pytest.mark.parametrize(("max_tokens", "longest"), [(12, 15), (13, 16), (14, 16), (10**9, 16)])
def test_the_context_bounds_the_longest_sequence(max_tokens: int, longest: int):
    batch = make_batch()
    row = batch.add_row(Request(1, np.zeros(3, np.int32), SamplingParams(max_tokens)), np.zeros(3, np.int32))
    assert batch.max_num_tokens[row] == longest


@pytest.mark.parametrize(
    ("seed", "column"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1)]
)
def test_seed_column_holds_the_64_bits(seed: int, column: int):
    batch = make_batch()
    request = Request(1, np.zeros(1, np.int32), SamplingParams(4, seed=seed))
    assert batch.seed[batch.add_row(request, request.prompt_token_ids)] == column


def test_stop_column_widens_for_a_row_that_needs_it_and_keeps_the_others():
    batch = make_batch()
    add(batch, 1, 2)
    add(batch, 2, 2, stop_token_ids=(70, 2, 71))
    assert batch.stop_token_ids[:, :2].T.tolist() == [[1, NO_TOKEN, NO_TOKEN], [2, 70, 71]]
    add(batch, 3, 2, ignore_eos=True, stop_token_ids=(72,))
    assert batch.stop_token_ids[:, 2].tolist() == [72, NO_TOKEN, NO_TOKEN]
    assert batch.stop_token_ids.shape == (3, 6)


def test_stop_columns_are_as_wide_as_the_widest_row_that_is_left():
    batch = make_batch()
    for seq_id, stop_token_ids in ((1, (70, 71, 72)), (2, ()), (3, (73,))):  # and each ends with token 1, 2, 3
        add(batch, seq_id, 2, stop_token_ids=stop_token_ids)
    assert batch.stop_token_ids.shape == (4, 6)
    batch.arrange(np.array([False, True, True]))
    assert batch.stop_token_ids[:, :2].T.tolist() == [[3, 73], [2, NO_TOKEN]]
    add(batch, 4, 2, stop_token_ids=(80, 81))
    batch.pop_row()
    assert batch.stop_token_ids[:, :2].T.tolist() == [[3, 73], [2, NO_TOKEN]]
    batch.arrange(np.zeros(2, np.bool_))
    assert batch.stop_token_ids.shape == (1, 6)


def test_arrange_moves_finished_prompts_to_the_front():
    batch = make_batch()
    add(batch, 1, 6, num_computed=4)
    add(batch, 2, 5, num_computed=4)
    add(batch, 3, 9, num_computed=0)
    add(batch, 4, 3, num_computed=2)
    batch.arrange(np.ones(4, np.bool_))
    assert (batch.num_rows, batch.num_decode_rows) == (4, 2)
    # Seat 0 is wrong (a chunk row), seat 3 as well: their occupants change places.
    for row, (seq_id, num_tokens, num_computed) in enumerate([(4, 3, 2), (2, 5, 4), (3, 9, 0), (1, 6, 4)]):
        check_row(batch, row, seq_id, num_tokens, num_computed)


def test_a_row_that_goes_is_replaced_from_the_end_of_its_zone_and_the_gap_is_closed():
    batch = make_batch()
    for seq_id, num_tokens, num_computed in [(1, 5, 4), (2, 5, 4), (3, 5, 4), (4, 9, 4), (5, 9, 8 - 4)]:
        add(batch, seq_id, num_tokens, num_computed=num_computed)
    batch.arrange(np.ones(5, np.bool_))
    assert batch.num_decode_rows == 3
    batch.arrange(np.array([False, True, True, True, True]))
    assert (batch.num_rows, batch.num_decode_rows) == (4, 2)
    for row, (seq_id, num_tokens, num_computed) in enumerate([(3, 5, 4), (2, 5, 4), (5, 9, 4), (4, 9, 4)]):
        check_row(batch, row, seq_id, num_tokens, num_computed)
    check_empty(batch, 4)


def test_removing_every_row_leaves_an_empty_batch():
    batch = make_batch()
    add(batch, 1, 5, num_computed=4)
    add(batch, 2, 8, num_computed=4)
    batch.arrange(np.zeros(2, np.bool_))
    assert (batch.num_rows, batch.num_decode_rows) == (0, 0)
    check_empty(batch, 0)
    check_empty(batch, 1)


def test_pop_row_undoes_add_row():
    batch = make_batch()
    add(batch, 1, 5)
    add(batch, 2, 5)
    batch.pop_row()
    assert batch.num_rows == 1
    check_row(batch, 0, 1, 5, 0)
    check_empty(batch, 1)


def test_random_arrangements_lose_and_mix_nothing():
    rng = np.random.default_rng(5)
    batch, alive, next_id = make_batch(max_num_seqs=12), {}, 1
    for _ in range(200):
        while batch.num_rows < 12 and rng.random() < 0.7:
            num_tokens = int(rng.integers(1, 16))
            num_computed = num_tokens - 1 if rng.random() < 0.5 else int(rng.integers(0, num_tokens))
            add(batch, next_id, num_tokens, num_computed=num_computed)
            alive[next_id] = (num_tokens, num_computed)
            next_id += 1
        keep = rng.random(batch.num_rows) < 0.7
        for seq_id in batch.seq_ids[: batch.num_rows][~keep].tolist():
            del alive[seq_id]
        batch.arrange(keep)
        assert sorted(batch.seq_ids[: batch.num_rows].tolist()) == sorted(alive)
        for row in range(batch.num_rows):
            seq_id = int(batch.seq_ids[row])
            check_row(batch, row, seq_id, *alive[seq_id])
            assert (alive[seq_id][0] - alive[seq_id][1] == 1) == (row < batch.num_decode_rows)


def test_blocks_of_lists_rows_in_order_without_padding():
    batch = make_batch()
    add(batch, 1, 9, num_computed=9)
    add(batch, 2, 9, num_computed=0)
    add(batch, 3, 9, num_computed=5)
    assert batch.blocks_of(np.array([2, 1, 0], np.int32)).tolist() == [30, 31, 10, 11, 12]
    assert batch.blocks_of(np.zeros(0, np.int32)).tolist() == []


def test_only_the_first_rows_are_a_slice():
    batch = make_batch()
    first = batch.first_rows(5)
    assert batch.as_slice(first) == slice(0, 5)
    assert batch.as_slice(first.copy()) == slice(0, 5)
    for rows in (first[2:], first[2:].copy(), np.array([1, 0, 2], np.int32), np.zeros(0, np.int32)):
        assert batch.as_slice(rows) is rows
