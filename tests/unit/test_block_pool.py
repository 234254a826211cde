"""The block pool: stack, reference counts, and their exact inverses."""

import numpy as np
import pytest

from service.core.block_pool import BlockPool, OutOfBlocksError


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def state(pool: BlockPool) -> tuple[list[int], list[int]]:
    return pool.free_blocks().tolist(), pool.ref_counts.tolist()


def test_fresh_pool_hands_out_every_block_but_the_null_block():
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert pool.take(4).tolist() == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.ref_counts.tolist() == [0, 1, 1, 1, 1]


def test_taking_more_than_is_free_raises_and_takes_nothing():
    pool = BlockPool(5)
    pool.take(2)
    before = state(pool)
    with pytest.raises(OutOfBlocksError):
        pool.take(3)
    assert state(pool) == before
    assert pool.take(2).tolist() == [3, 4]


def test_taking_no_blocks_is_legal():
    pool = BlockPool(2)
    assert pool.take(0).tolist() == []
    assert pool.num_free == 1


def test_released_blocks_go_out_again_first_one_first():
    pool = BlockPool(6)
    pool.take(5)
    pool.release(blocks(4, 2, 3))
    assert pool.num_free == 3
    assert pool.take(2).tolist() == [4, 2]


def test_a_block_held_twice_is_free_after_the_second_release():
    pool = BlockPool(3)
    taken = pool.take(1)
    pool.ref_counts[taken] += 1
    pool.release(taken)
    assert (pool.num_free, pool.ref_counts.tolist()) == (1, [0, 1, 0])
    pool.release(taken)
    assert (pool.num_free, pool.ref_counts.tolist()) == (2, [0, 0, 0])


def test_both_references_can_be_released_in_one_call():
    pool = BlockPool(3)
    taken = pool.take(1)
    pool.ref_counts[taken] += 1
    pool.release(np.concatenate([taken, taken]))
    assert sorted(pool.free_blocks().tolist()) == [1, 2]


def test_releasing_a_free_block_is_a_bug():
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.release(blocks(1))


def test_undoing_in_reverse_order_restores_the_stack_bit_for_bit():
    pool = BlockPool(9)
    first = pool.take(5)
    pool.release(first[[3, 1]])
    before = state(pool)

    taken = pool.take(3)
    released = np.concatenate([first[[4]], taken[:2]])
    pool.release(released)
    again = pool.take(4)
    assert state(pool) != before
    pool.untake(again)
    pool.unrelease(released)
    pool.untake(taken)
    assert state(pool) == before


def test_undoing_the_release_of_a_shared_block_restores_its_count():
    pool = BlockPool(4)
    taken = pool.take(2)
    pool.ref_counts[taken[0]] = 2
    before = state(pool)
    pool.release(taken)
    assert pool.num_free == 2
    pool.unrelease(taken)
    assert state(pool) == before
