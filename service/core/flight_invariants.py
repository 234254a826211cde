"""The invariants of steps in flight, as pure functions on a snapshot."""

from collections.abc import Iterator

from service.core.snapshot import PlanSnapshot, SchedulerSnapshot
from service.core.types import NULL_BLOCK


def blocks_cover_tokens_exactly(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-4: a row's blocks cover computed + scheduled tokens and no more, in both steps when two are in flight.

    One that has ended computes its last token in every step until its batch ends, or in the one that was planned ahead,
    and keeps the block for it. A row that goes on with what a step samples knows that token when it computes it.
    """
    num_continuing = _num_sampled(snapshot.plan if snapshot.plan_ahead is not None else None, len(snapshot.rows))
    for number, (row, num_scheduled) in enumerate(zip(snapshot.rows, _scheduled(snapshot), strict=True)):
        num_covered = row.num_computed_tokens + num_scheduled
        num_held = len(row.blocks) * snapshot.config.block_size
        if row.has_ended and num_covered <= row.num_computed_tokens < num_held:
            num_covered += 1
        if len(row.blocks) != -(-num_covered // snapshot.config.block_size):
            yield f"INV-4: row {number} holds {len(row.blocks)} blocks for {num_covered} tokens"
        if num_covered > len(row.token_ids) + num_continuing[number]:
            yield f"INV-4: row {number} computes {num_covered} tokens and knows {len(row.token_ids)}"


def written_blocks_have_one_owner(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-5: a block written this step has ref_count 1, and is not cached: only full blocks are."""
    block_size = snapshot.config.block_size
    cached = {block for block, _, _ in snapshot.cached_blocks}
    for row, num_scheduled in zip(snapshot.rows, _scheduled(snapshot), strict=True):
        start = row.num_computed_tokens
        for position in range(start, start + num_scheduled):
            block = row.blocks[position // block_size] if position // block_size < len(row.blocks) else NULL_BLOCK
            if snapshot.ref_counts[block] != 1:
                yield f"INV-5: sequence {row.seq_id} writes block {block}, held {snapshot.ref_counts[block]} times"
            if block in cached:
                yield f"INV-5: sequence {row.seq_id} writes block {block}, which is cached"


def step_is_within_budget(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-6: tokens, rows and blocks of a step are within budget, and the plan is what it says it is."""
    config = snapshot.config
    if len(snapshot.rows) > config.max_num_seqs:
        yield f"INV-6: {len(snapshot.rows)} rows"
    for plan, before in ((snapshot.plan, None), (snapshot.plan_ahead, snapshot.plan)):
        if plan is not None:
            yield from _plan_is_within_budget(snapshot, plan, before)


def _plan_is_within_budget(
    snapshot: SchedulerSnapshot, plan: PlanSnapshot, before: PlanSnapshot | None
) -> Iterator[str]:
    """`before` is in flight, too, and lands before the plan."""
    config, num_rows = snapshot.config, len(snapshot.rows)
    if not plan.rows or len(set(plan.rows)) != len(plan.rows) or min(plan.num_scheduled) < 1:
        yield f"INV-6: the plan's rows are {plan.rows}, with {plan.num_scheduled} tokens"
    if plan.num_tokens != sum(plan.num_scheduled) or plan.num_tokens > config.max_num_batched_tokens:
        yield f"INV-6: the plan counts {plan.num_tokens} tokens, of {plan.num_scheduled}"
    num_prompt_tokens = sum(plan.num_scheduled[plan.num_decode_rows :])
    if config.max_chunk_tokens and num_prompt_tokens > config.max_chunk_tokens:
        yield f"INV-6: {num_prompt_tokens} prompt tokens"
    num_landing, num_sampled = _num_scheduled(before, num_rows), _num_sampled(before, num_rows)
    is_last_sampled = [
        snapshot.rows[row].num_computed_tokens + num_landing[row] + count
        == len(snapshot.rows[row].token_ids) + num_sampled[row]
        for row, count in zip(plan.rows, plan.num_scheduled, strict=True)
    ]
    if is_last_sampled != list(plan.samples):
        yield f"INV-6: the plan samples {plan.samples} instead of {is_last_sampled}"
    is_decode = [count == 1 and samples for count, samples in zip(plan.num_scheduled, plan.samples, strict=True)]
    if is_decode != [index < plan.num_decode_rows for index in range(len(plan.rows))]:
        yield f"INV-6: {plan.num_decode_rows} decode rows do not come first: {is_decode}"


def step_ahead_goes_on(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-6 too: of each row that the step before samples from, a step planned ahead computes that token, first of all.

    It knows how far the rows are then. No row is in it that has ended, and nobody was admitted to it.
    """
    plan, ahead = snapshot.plan, snapshot.plan_ahead
    if plan is None or ahead is None:
        return
    sampled = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
    num_continuing = len(ahead.continues)
    going, others = list(ahead.rows[:num_continuing]), ahead.rows[num_continuing:]
    if [sampled[place] for place in ahead.continues] != going or not set(others).isdisjoint(sampled):
        yield f"INV-6: the step ahead goes on with {ahead.continues} of {sampled}, and computes rows {ahead.rows}"
    num_landing = _num_scheduled(plan, len(snapshot.rows))
    if [num_landing[row] for row in ahead.rows] != list(ahead.num_in_flight):
        yield f"INV-6: the step ahead counts {ahead.num_in_flight} tokens in flight of rows {ahead.rows}"
    if ahead.block_copies or ahead.restore:
        yield f"INV-6: the step ahead copies {ahead.block_copies} and restores {ahead.restore}"
    ended = [row for row in ahead.rows if snapshot.rows[row].has_ended]
    if ended:
        yield f"INV-6: the step ahead computes rows {ended}, which have ended"


def host_copies_are_sound(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-12: a step reads no host block that it writes, and restores to cached blocks of the same digests."""
    for plan in filter(None, (snapshot.plan, snapshot.plan_ahead)):
        yield from _host_copies_of_plan_are_sound(snapshot, plan)


def _host_copies_of_plan_are_sound(snapshot: SchedulerSnapshot, plan: PlanSnapshot) -> Iterator[str]:
    digests = snapshot.host.digests
    written = [host_block for _, host_block in plan.offload]
    read = [host_block for host_block, _ in plan.restore]
    restored = [block for _, block in plan.restore]
    for blocks in (written, read, restored, [block for block, _ in plan.offload]):
        if len(set(blocks)) != len(blocks):
            yield f"INV-12: a block comes twice in {blocks}, of {plan.offload} and {plan.restore}"
    if not set(written).isdisjoint(read):
        yield f"INV-12: host blocks {read} are read, and {written} written"
    cached = {block: digest for block, digest, _ in snapshot.cached_blocks}
    for host_block, block in plan.restore:
        if cached.get(block) != digests[host_block] or not snapshot.ref_counts[block]:
            yield f"INV-12: host block {host_block} is restored to block {block}, which is not cached as that"


def _scheduled(snapshot: SchedulerSnapshot) -> list[int]:
    """Tokens that the plans in flight schedule, per row."""
    plans = (_num_scheduled(plan, len(snapshot.rows)) for plan in (snapshot.plan, snapshot.plan_ahead))
    return [sum(counts) for counts in zip(*plans, strict=True)]


def _num_scheduled(plan: PlanSnapshot | None, num_rows: int) -> list[int]:
    """Tokens that the plan schedules, per row of the batch."""
    scheduled = [0] * num_rows
    if plan is not None:
        for row, count in zip(plan.rows, plan.num_scheduled, strict=True):
            scheduled[row] = count
    return scheduled


def _num_sampled(plan: PlanSnapshot | None, num_rows: int) -> list[int]:
    """Tokens that the plan samples, per row of the batch."""
    sampled = [0] * num_rows
    if plan is not None:
        for row, samples in zip(plan.rows, plan.samples, strict=True):
            sampled[row] = int(samples)
    return sampled
