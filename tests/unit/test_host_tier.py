"""What leaves the prefix cache for host memory, and comes back, step by step."""

import dataclasses

import numpy as np
import pytest

from service.core.host_tier import HostTier
from service.core.invariants import restored, violations
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.step_time import StepTimeModel
from service.core.types import Int32Array, Request, SamplingParams, StepResult
from service.errors import ConfigError
from tests.unit.scheduler_steps import ROOMY, commit, make, scheduled

A, B, C = (list(range(start, start + 13)) for start in (100, 200, 300))  # three full blocks of 4, and a token


def add(scheduler: Scheduler, seq_id: int, prompt: list[int], tenant: str = "") -> None:
    scheduler.add(Request(seq_id, np.array(prompt, np.int32), SamplingParams(1), tenant=tenant))


def run(scheduler: Scheduler, seq_id: int, prompt: list[int], tenant: str = "") -> tuple[StepPlan, int]:
    """Serve a prompt and one token. Returns the plan and the tokens that it computed."""
    add(scheduler, seq_id, prompt, tenant)
    plan = scheduler.plan(0)
    assert violations(scheduler.snapshot()) == []
    ((_, num_computed, _),) = scheduled(scheduler, plan)
    commit(scheduler, plan)
    assert violations(scheduler.snapshot()) == []
    return plan, num_computed


def small(**changes: object) -> Scheduler:
    """Room for one prompt: 5 blocks, of which it takes 4."""
    return make(num_blocks=6, **{"num_host_blocks": 8, **changes})


def pairs(copies: np.ndarray) -> list[list[int]]:
    return copies.tolist()


def test_what_the_device_evicts_is_copied_out_and_comes_back():
    scheduler = small()
    first, _ = run(scheduler, 1, A)  # blocks 1, 2, 3 are cached, 4 and 5 blank
    assert (pairs(first.offload), pairs(first.restore)) == ([], [])
    second, _ = run(scheduler, 2, B)  # takes 4, 5 and evicts 3, 2
    assert pairs(second.offload) == [[3, 1], [2, 0]]
    third, num_computed = run(scheduler, 3, A)  # holds 1; copies in 2 and 3; the rest is one token
    assert num_computed == 1
    assert sorted(host_block for host_block, _ in pairs(third.restore)) == [0, 1]
    counters = scheduler.counters
    assert (counters.totals.num_restored_blocks, counters.totals.num_hit_tokens) == (2, 12)


def test_a_run_of_blocks_stays_one_on_both_sides():
    """Evicted from the last to the first; host blocks are taken in the order of the device's, and again on return."""
    scheduler = make(num_blocks=9, num_host_blocks=20, max_model_len=40, max_num_batched_tokens=40)
    prompt, other = list(range(30)), list(range(50, 80))  # 7 full blocks each
    run(scheduler, 1, prompt)
    out, _ = run(scheduler, 2, other)
    back, _ = run(scheduler, 3, prompt)
    for copies in (out.offload, back.restore):
        ordered = copies[np.argsort(copies[:, 0])]
        assert len(copies) > 4
        assert (np.diff(ordered, axis=0) == 1).all()


class Names:
    """Of device blocks, all or the `known_blocks` known."""

    def __init__(self, names: dict[int, bytes], known_blocks: tuple[int, ...] | None = None) -> None:
        self._names = names
        self._known_blocks = names.keys() if known_blocks is None else known_blocks

    def known(self, blocks: Int32Array) -> list[bytes]:
        return [self._names[block] if block in self._known_blocks else b"" for block in blocks.tolist()]

    def all(self, blocks: Int32Array) -> list[bytes]:
        return [self._names[block] for block in blocks.tolist()]


def test_blocks_in_any_order_go_where_they_make_runs():
    tier = HostTier(dataclasses.replace(ROOMY, num_host_blocks=8), StepTimeModel())
    tier.begin()
    tier.offload(np.array([9, 4, 8], np.int32), Names({9: b"c", 4: b"b", 8: b"a"}))
    assert pairs(tier.copies[0]) == [[9, 2], [4, 0], [8, 1]]
    assert tier.copy_in(np.array([1, 0, 2], np.int32), np.array([31, 30, 33], np.int32), 0).tolist() == [31, 30, 33]
    assert tier.copy_in(np.array([5, 7, 6], np.int32), np.array([20, 21, 22], np.int32), 0).tolist() == [20, 22, 21]


def test_what_is_used_goes_to_the_end_a_child_before_its_parent():
    tier = HostTier(dataclasses.replace(ROOMY, num_host_blocks=8), StepTimeModel())
    tier.begin()
    names = Names({9: b"c", 8: b"b", 7: b"a", 6: b"other"})  # "a" is the first of its chain
    tier.offload(np.array([9, 8, 7, 6], np.int32), names)
    tier.use(np.array([1, 2, 3], np.int32))
    assert [tier.snapshot().digests[block] for block in tier.snapshot().queue] == [b"other", b"c", b"b", b"a"]


def test_what_is_here_already_is_not_copied_out_again():
    scheduler = small()
    num_copied = [len(run(scheduler, seq_id, (A, B)[seq_id % 2])[0].offload) for seq_id in range(6)]
    assert num_copied == [0, 2, 2, 0, 0, 0], "the first block of one prompt or the other always has room"
    assert (scheduler.counters.num_offloaded_blocks, scheduler.counters.num_host_blocks) == (4, 4)
    assert scheduler.counters.totals.num_restored_blocks == 2 * 4


def test_the_least_recently_used_goes_first_and_a_child_before_its_parent():
    scheduler = small(num_host_blocks=4)
    for seq_id, prompt in enumerate((A, B, C, A, B, C)):
        run(scheduler, seq_id, prompt)
    snapshot = scheduler.snapshot()
    digests = {}
    for name, prompt in (("A", A), ("B", B), ("C", C)):
        probe = Request(99, np.array(prompt, np.int32), SamplingParams(1))
        scheduler.add(dataclasses.replace(probe, seq_id=100 + ord(name)))
        sequence = scheduler._live.by_id[100 + ord(name)]
        scheduler._prefixes.find(sequence, 1)
        for number in range(3):
            digests[sequence.names.digests[16 * number : 16 * number + 16]] = (name, number)
    found = [digests[snapshot.host.digests[block]] for block in snapshot.host.queue]
    places = {entry: place for place, entry in enumerate(found)}
    assert len(found) == 4
    for name, number in found:
        parent = places.get((name, number - 1))
        assert parent is None or parent > places[name, number]


def test_when_host_memory_holds_less_than_a_plan_evicts_the_ancestors_have_it():
    scheduler = make(num_blocks=6, num_host_blocks=1)
    run(scheduler, 1, A)
    plan, _ = run(scheduler, 2, B)
    assert pairs(plan.offload) == [[2, 0]]  # and not 3, which comes after it in the prompt


def test_another_tenant_does_not_find_it():
    scheduler = small()
    run(scheduler, 1, A, tenant="a")
    run(scheduler, 2, B, tenant="a")
    plan, num_computed = run(scheduler, 3, A, tenant="b")
    assert (pairs(plan.restore), num_computed) == ([], 13)


def test_a_full_hit_leaves_the_last_token_to_compute():
    scheduler = small()
    run(scheduler, 1, A)
    run(scheduler, 2, B)
    _, num_computed = run(scheduler, 3, A[:12])
    assert num_computed == 4


def test_two_that_come_together_restore_a_prefix_once_and_share_it():
    scheduler = make(num_blocks=8, num_host_blocks=12, max_num_batched_tokens=32)
    for seq_id, prompt in enumerate((A, B, C)):
        run(scheduler, seq_id, prompt)
    assert scheduler.counters.num_host_blocks == 3
    add(scheduler, 10, A)
    add(scheduler, 11, A)
    plan = scheduler.plan(0)
    assert violations(scheduler.snapshot()) == []
    assert [num_tokens for _, num_tokens, _ in scheduled(scheduler, plan)] == [1, 1]
    assert len(plan.restore) == 3
    table = scheduler.batch.block_table
    assert table[0, :3].tolist() == table[1, :3].tolist() == sorted(block for _, block in pairs(plan.restore))


def test_a_copy_that_takes_longer_than_computing_is_not_made():
    """A step of n tokens takes 1000 n ns here, a block of 4 tokens 4000."""
    for block_ns, is_worth_it in ((3900.0, True), (4100.0, False)):
        scheduler = make(num_blocks=7, num_host_blocks=100, host_block_ns=block_ns)
        now_ns = 0
        for seq_id in range(60):
            plan = scheduler.plan(now_ns)
            add(scheduler, seq_id, [seq_id % 3 * 100 + number for number in range(8 + seq_id % 7)])
            if plan is not None:
                copied = len(plan.offload) + len(plan.restore)
                # The first steps only teach.
                assert copied == 0 or is_worth_it or seq_id < 20
                commit(scheduler, plan)
                now_ns += 1000 * plan.num_tokens + round(block_ns * copied)
        assert (scheduler.counters.totals.num_restored_blocks > 20) == is_worth_it


def test_copies_out_go_on_only_while_some_come_back():
    """Every second prompt is new. The others are either new as well, or always the same, whose blocks come back."""
    num_copied = {}
    for others in ("new", "same"):
        scheduler = make(num_blocks=6, num_host_blocks=16, host_block_ns=1000.0)
        now_ns = 0
        for seq_id in range(200):
            plan = scheduler.plan(now_ns)
            is_same = others == "same" and seq_id % 2
            add(scheduler, seq_id, A if is_same else [1000 + 13 * seq_id + number for number in range(13)])
            if plan is not None:
                commit(scheduler, plan)
                # A token takes 1000 ns, and so does a copy; a block has four tokens.
                now_ns += 1000 * (plan.num_tokens + len(plan.offload) + len(plan.restore))
        num_copied[others] = scheduler.counters.num_offloaded_blocks
    assert num_copied["new"] <= 16 + 600 / 16, "one filling, and a sixteenth of what is evicted"
    assert num_copied["same"] > 200, "most of the new ones' three hundred"


def test_what_turns_out_to_be_here_is_neither_copied_nor_paid_for():
    tier = HostTier(dataclasses.replace(ROOMY, num_host_blocks=8, host_block_ns=1600.0), StepTimeModel())
    tier.begin()
    tier.offload(np.array([8, 9], np.int32), Names({8: b"b", 9: b"a"}))
    tier.begin()
    tier.accept()
    assert tier.snapshot().budget == (6 * 1600, False)
    tier.offload(np.array([7, 5, 6], np.int32), Names({7: b"c", 5: b"a", 6: b"d"}, known_blocks=(7,)))
    assert [block for block, _ in pairs(tier.copies[0])] == [7, 6]
    # Three could be copied, of which a sixteenth is added.
    assert tier.snapshot().budget == (6 * 1600 + 3 * 100 - 2 * 1600, False)
    snapshot = tier.snapshot()
    assert [snapshot.digests[block] for block in snapshot.queue] == [b"b", b"c", b"a", b"d"]


@pytest.mark.parametrize(("host_block_ns", "is_named"), [(1000.0, False), (0.0, True)])
def test_blocks_get_names_only_when_they_may_be_copied(host_block_ns: float, is_named: bool):
    """Host memory has one block. When copying takes time, the first copy takes all that there is in the beginning."""
    scheduler = make(num_blocks=6, num_host_blocks=1, host_block_ns=host_block_ns)
    run(scheduler, 1, A)
    run(scheduler, 2, B)  # A's second block is copied out
    run(scheduler, 3, C[:10])  # evicts the first block of A and the last one of B, whose second one is block 5
    digests = {block: digest for block, digest, _ in scheduler.snapshot().cached_blocks}
    assert bool(digests[5]) == is_named
    assert scheduler.counters.num_offloaded_blocks == 1 + is_named


def test_an_aborted_plan_leaves_host_memory_as_it_was():
    scheduler = small(num_host_blocks=3)
    run(scheduler, 1, A)
    run(scheduler, 2, B)
    add(scheduler, 3, C)
    before = scheduler.snapshot()
    plan = scheduler.plan(0)
    assert len(plan.offload) == 1 + 2  # B's blocks, of which host memory held none; A's go
    assert before.host.digests != scheduler.snapshot().host.digests
    scheduler.abort(plan)
    assert restored(before, scheduler.snapshot()) == []


def test_an_aborted_plan_that_may_have_written_loses_the_host_blocks_it_wrote_to():
    scheduler = small(num_host_blocks=3)
    run(scheduler, 1, A)
    run(scheduler, 2, B)
    add(scheduler, 3, C)
    before = scheduler.snapshot()
    plan = scheduler.plan(0)
    written = set(plan.offload[:, 1].tolist())
    scheduler.abort(plan, has_written=True)
    after = scheduler.snapshot()
    assert violations(after) == []
    assert {block for block in before.host.queue if block not in written} == set(after.host.queue)
    assert [digest for block, digest in enumerate(after.host.digests) if digest and block in written] == []


@pytest.mark.parametrize("has_written", [False, True])
def test_what_a_step_ahead_may_have_overwritten_is_lost_with_both_steps(has_written: bool):
    """Host memory has one block, A's second; the step ahead evicts B's last to it, for its fifth token's block."""
    scheduler = make(num_blocks=6, num_host_blocks=1)
    for seq_id, prompt in enumerate((A, B, A[:5])):  # at last A's first block is used again, so that it stays
        run(scheduler, seq_id, prompt)
    scheduler.add(Request(10, np.array(C[:3], np.int32), SamplingParams(9)))
    commit(scheduler, scheduler.plan(0))
    before = scheduler.snapshot()
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    assert [0] == ahead.offload[:, 1].tolist()
    for plan in (ahead, first):
        scheduler.abort(plan, has_written=has_written)
    after = scheduler.snapshot()
    assert violations(after) == []
    assert after.host.digests == ((b"",) if has_written else before.host.digests)
    assert (ahead.offload.item(0) in {block for block, _, _ in after.cached_blocks}) == (not has_written)
    scheduler.cancel(10)
    plan, num_computed = run(scheduler, 11, A)
    assert (len(plan.restore), num_computed) == ((0, 9) if has_written else (1, 5))


def test_a_step_restores_no_more_tokens_than_it_may_compute_or_one_prompt():
    """Three prompts of three blocks each wait, which are all in host memory; a step may compute 16 tokens."""
    scheduler = make(num_blocks=16, num_host_blocks=30)
    for seq_id in range(8):
        run(scheduler, seq_id, [*range(100 * seq_id, 100 * seq_id + 13)])
    for seq_id in range(3):
        add(scheduler, 100 + seq_id, [*range(100 * seq_id, 100 * seq_id + 13)])
    num_restored = []
    while scheduler.has_work:
        plan = scheduler.plan(0)
        num_restored.append(len(plan.restore))
        scheduler.commit(plan, StepResult(np.full(np.count_nonzero(plan.samples), 50, np.int32)))
    assert num_restored == [6, 3]


def test_host_memory_needs_the_prefix_cache():
    with pytest.raises(ConfigError, match="num_host_blocks is 8, but must be 0 with prefix_cache off"):
        small(prefix_cache=False)
