"""RankQueue against a dictionary that is sorted whenever somebody asks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.chain import ChainNames
from service.core.rank_queue import RankQueue
from service.core.sequence import Sequence
from service.core.types import Request, SamplingParams

actions = st.lists(
    st.tuples(st.sampled_from(["push", "push", "remove"]), st.integers(0, 11), st.integers(0, 5)), max_size=60
)


def sequence(seq_id: int, rank: int) -> Sequence:
    tokens = np.zeros(1 + seq_id, np.int32)
    return Sequence(Request(seq_id, tokens, SamplingParams(1)), rank, 0, tokens, ChainNames(b"", b"", 4))


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(actions=actions, ascending=st.booleans())
def test_the_lowest_ranks_come_first_whatever_order_they_came_in(actions: list, ascending: bool):
    queue, expected = RankQueue(), {}
    ranks: dict[int, int] = {}  # a sequence that comes back has the rank that it had
    for number, (kind, seq_id, rank) in enumerate(actions):
        if kind == "push" and seq_id not in expected:
            ranks.setdefault(seq_id, number if ascending else rank)
            expected[seq_id] = sequence(seq_id, ranks[seq_id])
            queue.push(expected[seq_id])
        elif kind == "remove" and seq_id in expected:
            del expected[seq_id]
            queue.remove(seq_id)
        in_order = sorted(expected.values(), key=lambda sequence: (sequence.rank, sequence.seq_id))
        assert queue.head() is (in_order[0] if in_order else None)
        assert queue.first(3) == in_order[:3]
        assert queue.first(20) == in_order
        assert (len(queue), queue.num_tokens) == (len(expected), sum(1 + seq_id for seq_id in expected))


def test_entries_of_sequences_that_have_left_do_not_pile_up():
    queue = RankQueue()
    for round_ in range(1000):
        queue.push(sequence(1, 5))
        queue.push(sequence(2, 3 if round_ % 2 else 9))
        queue.remove(1)
        queue.remove(2)
    assert len(queue._in_order) + len(queue._heap) <= 18
    assert queue.head() is None


def test_a_sequence_that_left_and_came_back_several_times_counts_once():
    queue, others = RankQueue(), [sequence(1, 9), sequence(2, 4), sequence(3, 5)]
    for other in others:
        queue.push(other)
    back = sequence(4, 3)
    for _ in range(3):
        queue.push(back)
        queue.remove(4)
    queue.push(back)
    assert queue.first(3) == [back, others[1], others[2]]


def test_what_is_left_keeps_its_order_when_entries_of_others_are_dropped():
    queue, live = RankQueue(), [sequence(1, 9), sequence(2, 3), sequence(3, 6)]
    for one in live:
        queue.push(one)
    for _ in range(30):  # behind the others, so that none of the entries surfaces
        queue.push(sequence(4, 10))
        queue.remove(4)
    assert queue.head() is live[1]
    assert queue.first(3) == [live[1], live[2], live[0]]
