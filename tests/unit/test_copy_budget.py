"""What copies to host memory may cost, computed by hand."""

from itertools import pairwise

import pytest

from service.core.copy_budget import CopyBudget
from service.core.undo_log import UndoLog


def test_host_memory_is_filled_once_on_trust():
    budget = CopyBudget(160, 100.0, UndoLog())
    assert [budget.spend(32) for _ in range(6)] == [True, True, True, True, True, False]


def test_without_copies_in_a_sixteenth_of_the_blocks_is_copied():
    """In pieces: the time for a sixteenth of the memory, 10 blocks, is saved up, and spent on as many in a row."""
    budget = CopyBudget(160, 100.0, UndoLog())
    copied = [budget.spend(1) for _ in range(16_000)]
    later = copied[2000:]
    assert sum(later) / len(later) == pytest.approx(1 / 16, abs=0.002)
    num_pieces = sum(is_copied and not was for was, is_copied in pairwise(later))
    assert sum(later) / num_pieces == pytest.approx(10, abs=1.0)


def test_copies_in_pay_for_copies_out():
    """Each block that is copied out comes back once, and saves four times its copy's cost: all are copied."""
    budget = CopyBudget(160, 100.0, UndoLog())
    for _ in range(10_000):
        assert budget.spend(4)
        budget.earn(4 * 400.0)


def test_no_more_is_saved_up_than_one_filling():
    budget = CopyBudget(160, 100.0, UndoLog())
    budget.earn(1e9)
    assert [budget.spend(80), budget.spend(80), budget.spend(80)] == [True, True, False]


def test_copies_that_cost_nothing_need_no_budget():
    budget = CopyBudget(4, 0.0, UndoLog())
    assert all(budget.spend(4) for _ in range(100))


def test_a_rolled_back_plan_has_spent_nothing():
    log = UndoLog()
    budget = CopyBudget(160, 100.0, log)
    before = budget.state
    log.open()
    assert [budget.spend(160), budget.spend(1)] == [True, False]
    budget.earn(50.0)
    log.undo()
    assert budget.state == before
