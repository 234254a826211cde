"""The block pool: blank, evictable and referenced blocks, eviction order, and taking everything back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.block_pool import BlockPool, OutOfBlocksError
from service.core.chain import NO_MATCH, ChainNames, Chains, Match
from service.core.types import NULL_BLOCK


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def state(pool: BlockPool) -> tuple[object, ...]:
    return (
        pool.num_blank,
        pool.num_evictable,
        pool.blank_blocks().tolist(),
        pool.evictable_blocks().tolist(),
        pool.ref_counts.tolist(),
        pool.cache.entries(),
        pool.cache.is_cached.tolist(),
    )


def digest(name: str) -> bytes:
    return name.encode().ljust(16, b"-")


def chain(name: str, start: int = 0) -> bytes:
    """Digests of a chain of blocks, one for each letter; chains with the same first letters share their first ones."""
    return b"".join(digest(name[: index + 1]) for index in range(start, len(name)))


def publish(pool: BlockPool, own: np.ndarray, digests: bytes, parent: int = NULL_BLOCK) -> np.ndarray:
    """Publish a row's blocks. Returns those that the row holds now."""
    published = Chains.of_one(parent, 0, ChainNames(digests, b"", 4), own)
    assert pool.publish(published) == (published.blocks.tolist() != own.tolist())
    return published.blocks


def published(pool: BlockPool, name: str) -> np.ndarray:
    """Take and publish a chain of blocks, one for each letter."""
    return publish(pool, pool.take(len(name)), chain(name))


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
    pool.hold(taken)
    pool.release(taken)
    assert (pool.num_free, pool.ref_counts.tolist()) == (1, [0, 1, 0])
    pool.release(taken)
    assert (pool.num_free, pool.ref_counts.tolist()) == (2, [0, 0, 0])


def test_both_references_can_be_released_in_one_call():
    pool = BlockPool(3)
    taken = pool.take(1)
    pool.hold(taken)
    pool.release(np.concatenate([taken, taken]))
    assert sorted(pool.blank_blocks().tolist()) == [1, 2]


@pytest.mark.parametrize("released", [blocks(1), blocks(2, 2)])
def test_releasing_a_block_more_often_than_it_was_taken_is_a_bug(released: np.ndarray):
    pool = BlockPool(3)
    pool.release(pool.take(1))
    pool.take(2)
    pool.release(blocks(1))
    with pytest.raises(AssertionError):
        pool.release(released)


def test_shared_blocks_are_blank_again_in_the_order_of_the_release():
    pool = BlockPool(6)
    pool.take(5)
    pool.hold(blocks(5, 2))
    pool.release(blocks(5, 2, 4, 5, 2, 1))
    assert pool.take(4).tolist() == [5, 2, 4, 1]


def test_cached_blocks_stay_when_nobody_holds_them_and_go_last():
    pool = BlockPool(6)
    held = published(pool, "abc")
    pool.release(held)
    assert (pool.num_blank, pool.num_evictable, pool.num_free) == (2, 3, 5)
    assert pool.cache.match(chain("abcd"), 4).blocks.tolist() == held.tolist()
    assert pool.take(2).tolist() == [4, 5]
    assert pool.cache.match(chain("abc"), 3).blocks.tolist() == held.tolist()


def test_the_last_block_of_the_least_recently_used_chain_is_evicted_first():
    pool = BlockPool(8)
    old, new = published(pool, "abc"), published(pool, "xyz")
    pool.release(old)
    pool.release(new)
    pool.hold(old[:1])  # used once more
    pool.release(old[:1])
    assert pool.evictable_blocks().tolist() == [3, 2, 6, 5, 4, 1]
    assert pool.take(4).tolist() == [7, 3, 2, 6]
    assert [len(pool.cache.match(chain(name), 3).blocks) for name in ("abc", "xyz")] == [1, 2]


def test_of_chains_released_together_a_shared_parent_goes_after_all_its_children():
    pool = BlockPool(6)
    first = published(pool, "ab")
    other = pool.take(2)
    pool.hold(first[:1])
    pool.release(other[:1])
    second = np.concatenate([first[:1], publish(pool, other[1:], digest("ax"), int(first[0]))])
    pool.release(np.concatenate([first, second]))
    assert pool.evictable_blocks().tolist() == [4, 2, 1]


def test_a_block_that_another_has_published_already_is_given_up_for_that():
    pool = BlockPool(7)
    first = published(pool, "ab")
    pool.release(first)
    second = publish(pool, pool.take(3), chain("abc"))
    assert second.tolist() == [1, 2, 5]
    assert pool.ref_counts.tolist() == [0, 1, 1, 0, 0, 1, 0]
    assert (pool.num_evictable, sorted(pool.blank_blocks().tolist())) == (0, [3, 4, 6])
    assert pool.cache.entries() == ((1, digest("a"), 0), (2, digest("ab"), 1), (5, b"", 2))
    assert pool.cache.match(chain("abcd"), 4).blocks.tolist() == [1, 2, 5]
    assert pool.cache.entries() == ((1, digest("a"), 0), (2, digest("ab"), 1), (5, digest("abc"), 2))


def test_what_a_sequence_publishes_later_is_found_behind_what_it_has_published_before():
    pool = BlockPool(8)
    own, names = pool.take(4), ChainNames(chain("abcd"), b"", 4)
    pool.publish(Chains.of_one(NULL_BLOCK, 0, names, own[:2]))
    other = publish(pool, pool.take(1), digest("abx"), parent=2)
    pool.publish(Chains.of_one(2, 2, names, own[2:]))
    pool.publish(Chains.of_one(5, 3, ChainNames(chain("abxy"), b"", 4), pool.take(1)))
    assert pool.cache.match(chain("abcd"), 4).blocks.tolist() == own.tolist() == [1, 2, 3, 4]
    assert pool.cache.match(chain("abxyz"), 5).blocks.tolist() == [1, 2, *other.tolist(), 6]


def test_of_a_match_only_what_has_come_or_gone_is_looked_up_again():
    pool = BlockPool(8)
    held, names = pool.take(3), ChainNames(chain("abc"), b"", 4)
    pool.publish(Chains.of_one(NULL_BLOCK, 0, names, held[:2]))
    found = pool.cache.match(chain("abcd"), 4)
    assert found.blocks.tolist() == [1, 2]
    assert pool.cache.match(chain("abcd"), 4, found) is found
    pool.publish(Chains.of_one(2, 2, names, held[2:]))
    longer = pool.cache.match(chain("abcd"), 4, found)
    assert longer.blocks.tolist() == [1, 2, 3]
    pool.release(held)
    pool.take(5)  # 3 is evicted
    assert pool.cache.match(chain("abcd"), 4, longer).blocks.tolist() == [1, 2]
    assert pool.cache.match(chain("abcd"), 4, found) is found


def test_a_tail_that_has_grown_is_taken_back_as_far_as_it_was():
    pool = BlockPool(8)
    own, names = pool.take(4), ChainNames(chain("abcd"), b"", 4)
    pool.publish(Chains.of_one(NULL_BLOCK, 0, names, own[:2]))
    before = state(pool)
    pool.begin()
    pool.publish(Chains.of_one(2, 2, names, own[2:]))
    assert pool.cache.entries() == ((1, digest("a"), 0), (2, b"", 1), (3, b"", 2), (4, b"", 3))
    pool.roll_back()
    assert state(pool) == before
    pool.publish(Chains.of_one(2, 2, names, own[2:3]))
    assert pool.cache.match(chain("abcd"), 4).blocks.tolist() == [1, 2, 3]


def test_chains_of_several_sequences_are_published_together():
    pool = BlockPool(20)
    base = published(pool, "ab")
    table = pool.take(8)
    assert table.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    names = [ChainNames(chain(name), b"", 4) for name in ("abcd", "abce", "abxy", "qr")]
    # Two behind the leaf that begin alike, one that does not, and one behind nothing.
    chains = Chains(
        np.array([base[1], base[1], base[1], NULL_BLOCK]),
        [2, 2, 2, 0],
        names,
        np.array([0, 2, 4, 6]),
        table.astype(np.int64),
    )
    assert pool.publish(chains)
    assert chains.blocks.tolist() == [3, 4, 3, 6, 7, 8, 9, 10]
    assert (pool.ref_counts[3], pool.ref_counts[5]) == (2, 0)
    for name, held in (("abcd", [1, 2, 3, 4]), ("abce", [1, 2, 3, 6]), ("abxy", [1, 2, 7, 8]), ("qr", [9, 10])):
        assert pool.cache.match(chain(name), len(name)).blocks.tolist() == held
    assert [block for block, _, _ in pool.cache.entries()] == [1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_a_held_block_is_never_evicted():
    pool = BlockPool(4)
    pool.release(published(pool, "abc"))
    pool.hold(blocks(1))
    assert pool.take(2).tolist() == [3, 2]
    with pytest.raises(OutOfBlocksError):
        pool.take(1)


def test_entries_of_the_eviction_queue_do_not_pile_up():
    pool = BlockPool(4)
    held = published(pool, "abc")
    for _ in range(1000):
        pool.begin()
        pool.release(held)
        pool.hold(held)
        pool.accept()
    assert len(pool._evictable._entries) <= 32
    pool.release(held)
    assert pool.evictable_blocks().tolist() == [3, 2, 1]


class Rows:
    """Random but legal use of a pool: rows that take, publish and release, on chains that often coincide."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.rows: list[tuple[str, np.ndarray]] = []
        self.found: dict[str, Match] = {}  # by chain, when it was last looked up

    def act(self, number: int, letters: int) -> None:
        pool = self.pool
        if number % 3 and letters <= pool.num_free:
            name = "".join("ab"[(number >> index) & 1] for index in range(letters))
            self.found[name] = pool.cache.match(chain(name), letters - 1, self.found.get(name, NO_MATCH))
            hit = self.found[name].blocks
            assert hit.tolist() == pool.cache.match(chain(name), letters - 1).blocks.tolist()
            pool.hold(hit)
            if letters - len(hit) > pool.num_free:
                pool.release(hit)
                return
            table = np.concatenate([hit, pool.take(letters - len(hit))])
            if number % 5:
                parent = int(hit[-1]) if len(hit) else NULL_BLOCK
                table[len(hit) :] = publish(pool, table[len(hit) :], chain(name, len(hit)), parent)
            self.rows.append((name, table))
        elif self.rows:
            count = 1 + letters % 2
            released = [self.rows.pop(number % len(self.rows)) for _ in range(min(count, len(self.rows)))]
            pool.release(np.concatenate([table for _, table in released]))


actions = st.lists(st.tuples(st.integers(0, 255), st.integers(1, 5)), max_size=25)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(before=actions, during=actions, after=actions)
def test_rolling_back_restores_the_pool_bit_for_bit(before: list, during: list, after: list):
    pool = BlockPool(9)
    rows = Rows(pool)
    for action in before:
        rows.act(*action)
    old, old_rows = state(pool), list(rows.rows)
    pool.begin()
    for action in during:
        rows.act(*action)
    pool.roll_back()
    assert state(pool) == old
    rows.rows = old_rows
    # And it goes on as a pool that never knew of the changes.
    for action in after:
        rows.act(*action)
    again = Rows(BlockPool(9))
    for action in before + after:
        again.act(*action)
    assert state(pool) == state(again.pool)
