"""EvictionQueue against a plain list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.eviction_queue import EvictionQueue
from service.core.undo_log import UndoLog

NUM_BLOCKS = 320


def numbers(start: int, end: int) -> np.ndarray:
    return np.arange(start, end, dtype=np.int32)


def test_blocks_that_were_taken_out_in_a_long_run_are_not_given_up():
    queue = EvictionQueue(100, UndoLog())
    queue.push(numbers(0, 69))
    queue.remove(numbers(1, 67))  # more than are looked at in the first scan
    assert queue.pop(2).tolist() == [0, 67]
    assert (queue.num_blocks, queue.in_order().tolist()) == (1, [68])


ranges = st.tuples(
    st.sampled_from(["push", "remove", "remove", "pop"]), st.integers(0, NUM_BLOCKS), st.integers(1, 120)
)


def act(queue: EvictionQueue, expected: list[int], kind: str, start: int, count: int) -> None:
    if kind == "push":
        blocks = [block for block in range(start, min(start + count, NUM_BLOCKS)) if block not in expected]
        queue.push(np.array(blocks, np.int32))
        expected += blocks
    elif kind == "remove":
        blocks = expected[start : start + count]
        queue.remove(np.array(blocks, np.int32))
        del expected[start : start + count]
    else:
        count = min(count, len(expected))
        assert queue.pop(count).tolist() == expected[:count]
        del expected[:count]
    assert (queue.num_blocks, queue.in_order().tolist()) == (len(expected), expected)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(before=st.lists(ranges, max_size=12), planned=st.lists(ranges, max_size=4), ahead=st.lists(ranges, max_size=4))
@pytest.mark.parametrize("num_undone", [0, 1, 2])
def test_the_queue_is_a_list_whatever_is_taken_out_and_undone(num_undone: int, before, planned, ahead):
    log = UndoLog()
    queue, expected = EvictionQueue(NUM_BLOCKS, log), list(range(NUM_BLOCKS))
    queue.push(numbers(0, NUM_BLOCKS))
    for action in before:
        act(queue, expected, *action)
    states = [list(expected)]
    for part in (planned, ahead):
        log.open()
        for action in part:
            act(queue, expected, *action)
        states.append(list(expected))
    for _ in range(num_undone):
        log.undo()
        states.pop()
        assert (queue.num_blocks, queue.in_order().tolist()) == (len(states[-1]), states[-1])
    while log.is_open:
        log.close()
    queue.compact()
    assert queue.in_order().tolist() == states[-1]
    assert queue.pop(len(states[-1])).tolist() == states[-1]
