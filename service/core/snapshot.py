"""The scheduler's state as a value: what invariants are checked on."""

from collections.abc import Iterable
from dataclasses import dataclass

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.forks import Forks
from service.core.host_tier import HostSnapshot
from service.core.ordering import OrderingPolicy
from service.core.plan import StepPlan
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.totals import Totals
from service.core.types import Int32Array
from service.core.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerCounters:
    """Sizes now, and totals since the start."""

    totals: Totals
    num_waiting: int  # in the queue, never run
    num_preempted: int  # in the queue, have run
    num_running: int  # rows of the batch, those included that have ended and leave later
    num_waiting_tokens: int  # known tokens of the queue
    num_free_blocks: int  # blank or evictable
    num_evictable_blocks: int  # cached, and held by nobody
    num_blocks: int  # of the KV buffer, the null block included
    num_host_blocks: int  # in use
    num_offloaded_blocks: int  # copied to host memory since the start


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """One running sequence."""

    seq_id: int
    rank: int
    token_ids: tuple[int, ...]  # all known ones
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: tuple[int, ...]
    num_published_blocks: int
    has_ended: bool  # and leaves later
    has_failed: bool  # as it ended


@dataclass(frozen=True, slots=True)
class QueuedSnapshot:
    """One sequence of the queue."""

    seq_id: int
    rank: int
    token_ids: tuple[int, ...]
    num_preemptions: int
    num_skips: int
    is_preempted: bool


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """The plan in flight."""

    step_id: int
    rows: tuple[int, ...]
    num_scheduled: tuple[int, ...]
    samples: tuple[bool, ...]
    num_decode_rows: int
    num_tokens: int
    block_copies: tuple[tuple[int, int], ...]  # (source, target)
    offload: tuple[tuple[int, int], ...]  # (device block, host block)
    restore: tuple[tuple[int, int], ...]  # (host block, device block)
    num_in_flight: tuple[int, ...]  # tokens of each row that the step before computes; empty: not planned ahead
    continues: tuple[int, ...]  # samples of the step before


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Everything that later plans depend on."""

    config: SchedulerConfig
    counters: SchedulerCounters
    rows: tuple[RowSnapshot, ...]  # in row order
    num_decode_rows: int
    queue: tuple[QueuedSnapshot, ...]  # next one first
    forks: tuple[QueuedSnapshot, ...]  # that wait for the prompt they share
    blank_blocks: tuple[int, ...]  # in stack order
    evictable_blocks: tuple[int, ...]  # the next one to be evicted first
    cached_blocks: tuple[tuple[int, bytes, int], ...]  # (block, digest, parent), by block
    ref_counts: tuple[int, ...]  # [num_blocks]
    host: HostSnapshot
    policy_counters: tuple[tuple[str, float], ...]
    plan: PlanSnapshot | None  # the earlier one in flight
    plan_ahead: PlanSnapshot | None
    cancelled_in_flight: tuple[int, ...]  # running sequences that end when the plan has landed


def take_snapshot(
    config: SchedulerConfig,
    counters: SchedulerCounters,
    state: tuple[BatchState, BlockPool, WaitingQueue, Forks, OrderingPolicy],
    plans: list[StepPlan],
    cancelled_in_flight: Iterable[int],
) -> SchedulerSnapshot:
    """Copy the state of a scheduler's parts."""
    batch, pool, queue, forks, policy = state
    return SchedulerSnapshot(
        config=config,
        counters=counters,
        rows=tuple(_row_snapshot(batch, row) for row in range(batch.num_rows)),
        num_decode_rows=batch.num_decode_rows,
        queue=tuple(_queued_snapshot(sequence) for sequence in queue.in_order()),
        forks=tuple(_queued_snapshot(sequence) for sequence in forks.in_order()),
        blank_blocks=tuple(pool.blank_blocks().tolist()),
        evictable_blocks=tuple(pool.evictable_blocks().tolist()),
        cached_blocks=pool.cache.entries(),
        ref_counts=tuple(pool.ref_counts.tolist()),
        host=HostSnapshot() if pool.host is None else pool.host.snapshot(),
        policy_counters=policy.counters(),
        plan=_plan_snapshot(plans[0]) if plans else None,
        plan_ahead=_plan_snapshot(plans[1]) if len(plans) > 1 else None,
        cancelled_in_flight=tuple(cancelled_in_flight),
    )


def _row_snapshot(batch: BatchState, row: int) -> RowSnapshot:
    return RowSnapshot(
        seq_id=int(batch.seq_ids[row]),
        rank=int(batch.rank[row]),
        token_ids=tuple(batch.token_ids[row, : batch.num_tokens[row]].tolist()),
        num_prompt_tokens=int(batch.num_prompt_tokens[row]),
        num_computed_tokens=int(batch.num_computed_tokens[row]),
        blocks=tuple(batch.block_table[row, : batch.num_blocks[row]].tolist()),
        num_published_blocks=int(batch.num_published_blocks[row]),
        has_ended=bool(batch.has_ended[row]),
        has_failed=bool(batch.has_failed[row]),
    )


def _queued_snapshot(sequence: Sequence) -> QueuedSnapshot:
    return QueuedSnapshot(
        sequence.seq_id,
        sequence.rank,
        tuple(sequence.token_ids.tolist()),
        sequence.num_preemptions,
        sequence.num_skips,
        sequence.status is SequenceStatus.PREEMPTED,
    )


def _plan_snapshot(plan: StepPlan) -> PlanSnapshot:
    return PlanSnapshot(
        step_id=plan.step_id,
        rows=tuple(plan.rows.tolist()),
        num_scheduled=tuple(plan.num_scheduled.tolist()),
        samples=tuple(plan.samples.tolist()),
        num_decode_rows=plan.num_decode_rows,
        num_tokens=plan.num_tokens,
        block_copies=_pairs(plan.block_copies),
        offload=_pairs(plan.offload),
        restore=_pairs(plan.restore),
        num_in_flight=tuple(plan.num_in_flight.tolist()),
        continues=tuple(plan.continues.tolist()),
    )


def _pairs(copies: Int32Array) -> tuple[tuple[int, int], ...]:
    return tuple((source, target) for source, target in copies.tolist())
