"""The scheduler's invariants, as pure functions on a snapshot.

Each yields what is wrong, one line per violation, and nothing when all is well. INV-10 speaks of tokens, and is checked
where tokens are made.
"""

from collections import Counter
from collections.abc import Iterator

from service.core.flight_invariants import (
    blocks_cover_tokens_exactly,
    host_copies_are_sound,
    step_ahead_goes_on,
    step_is_within_budget,
    written_blocks_have_one_owner,
)
from service.core.snapshot import SchedulerSnapshot
from service.core.types import NULL_BLOCK


def violations(snapshot: SchedulerSnapshot) -> list[str]:
    """Everything that is wrong with one state, in flight or not."""
    checks = (
        every_sequence_is_somewhere,
        every_block_is_somewhere,
        cached_blocks_form_a_tree,
        ref_counts_match_block_tables,
        blocks_cover_tokens_exactly,
        written_blocks_have_one_owner,
        step_is_within_budget,
        step_ahead_goes_on,
        something_is_left_to_compute,
        decode_rows_come_first,
        ended_rows_leave,
        computed_prompts_are_published,
        every_host_block_is_somewhere,
        host_copies_are_sound,
    )
    return [violation for check in checks for violation in check(snapshot)]


def every_sequence_is_somewhere(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-1: submitted = waiting + running + preempted + finished, and no sequence is in two places."""
    counters = snapshot.counters
    seq_ids = [row.seq_id for row in snapshot.rows]
    seq_ids += [queued.seq_id for queued in snapshot.queue + snapshot.forks]
    num_preempted = sum(queued.is_preempted for queued in snapshot.queue)
    counted = (counters.num_running, counters.num_preempted, counters.num_waiting)
    actual = (len(snapshot.rows), num_preempted, len(snapshot.queue) + len(snapshot.forks) - num_preempted)
    if counted != actual:
        yield f"INV-1: (running, preempted, waiting) counted as {counted}, but are {actual}"
    totals = counters.totals
    if totals.num_submitted != sum(actual) + totals.num_finished:
        yield f"INV-1: {totals.num_submitted} submitted, {sum(actual)} live, {totals.num_finished} finished"
    if len(set(seq_ids)) != len(seq_ids):
        yield f"INV-1: a sequence is in two places: {seq_ids}"
    if counters.num_waiting_tokens != sum(len(queued.token_ids) for queued in snapshot.queue):
        yield f"INV-1: the queue counts {counters.num_waiting_tokens} tokens"


def every_block_is_somewhere(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-2: null + blank + evictable + referenced = num_blocks, and free blocks are unreferenced and distinct."""
    blank, evictable = snapshot.blank_blocks, snapshot.evictable_blocks
    free = blank + evictable
    num_referenced = sum(count > 0 for count in snapshot.ref_counts)
    total = 1 + len(free) + num_referenced
    if total != snapshot.config.num_blocks or len(free) != snapshot.counters.num_free_blocks:
        yield f"INV-2: null, {blank} blank, {evictable} evictable and {num_referenced} referenced make {total}"
    if len(set(free)) != len(free) or NULL_BLOCK in free:
        yield f"INV-2: the free blocks are not distinct real ones: {free}"
    for block in free:
        if snapshot.ref_counts[block]:
            yield f"INV-2: block {block} is free and referenced"
    cached = {block for block, _, _ in snapshot.cached_blocks}
    if not cached.issuperset(evictable) or not cached.isdisjoint(blank):
        yield f"INV-2: of {cached} cached blocks, {evictable} are evictable and {blank} blank"


def cached_blocks_form_a_tree(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-2 too: a cached block's parent is cached, held whenever the block is, and evicted after it."""
    parents = {block: parent for block, _, parent in snapshot.cached_blocks}
    places = {block: place for place, block in enumerate(snapshot.evictable_blocks)}
    digests = [digest for _, digest, _ in snapshot.cached_blocks if digest]
    if len(set(digests)) != len(digests):
        yield "INV-2: a digest names two blocks"
    for block, parent in parents.items():
        if parent == NULL_BLOCK:
            continue
        if parent not in parents:
            yield f"INV-2: block {block} is cached, and its parent {parent} is not"
        elif parent in places and places.get(block, len(places)) > places[parent]:
            yield f"INV-2: block {parent} would be evicted before its child {block}"
    for row in snapshot.rows:
        published = row.blocks[: row.num_published_blocks]
        chain = [(block, parents.get(block)) for block in published]
        if chain != list(zip(published, (NULL_BLOCK, *published), strict=False)):
            yield f"INV-2: sequence {row.seq_id} has published {published}, of which (block, parent) are {chain}"


def ref_counts_match_block_tables(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-3: ref_count[b] = occurrences of b in live block tables."""
    occurrences = Counter(block for row in snapshot.rows for block in row.blocks)
    if NULL_BLOCK in occurrences:
        yield "INV-3: a block table holds the null block"
    for block, count in enumerate(snapshot.ref_counts):
        if count != occurrences[block]:
            yield f"INV-3: block {block} is counted {count} times and held {occurrences[block]} times"


def something_is_left_to_compute(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-8: a prefix hit leaves at least one token to compute."""
    for row in snapshot.rows:
        if row.num_computed_tokens >= len(row.token_ids):
            yield f"INV-8: sequence {row.seq_id} has computed {row.num_computed_tokens} of {len(row.token_ids)} tokens"


def decode_rows_come_first(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """Between steps, rows with one token left come before the others, and everybody has a token left."""
    if snapshot.plan is not None:
        return
    left = [len(row.token_ids) - row.num_computed_tokens for row in snapshot.rows]
    is_decode = [index < snapshot.num_decode_rows for index in range(len(left))]
    if [count == 1 for count in left] != is_decode or min(left, default=1) < 1:
        yield f"row order: {snapshot.num_decode_rows} decode rows, tokens left are {left}"


def ended_rows_leave(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """Between steps, only batches that end together keep rows that have ended. No row has failed and goes on."""
    ended = [row.seq_id for row in snapshot.rows if row.has_ended]
    if ended and snapshot.plan is None and snapshot.config.batching == "continuous":
        yield f"ended rows: sequences {ended} have ended, and no step computes them"
    failed = [row.seq_id for row in snapshot.rows if row.has_failed and not row.has_ended]
    if failed:
        yield f"ended rows: sequences {failed} have failed, and go on"


def computed_prompts_are_published(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """With the prefix cache on, others can share every full block of a prompt that is computed.

    While a step planned ahead is in flight alone, what the step before it has computed is not published.
    """
    if not snapshot.config.prefix_cache or (snapshot.plan is not None and snapshot.plan.num_in_flight):
        return
    for row in snapshot.rows:
        num_full_blocks = min(row.num_computed_tokens, row.num_prompt_tokens) // snapshot.config.block_size
        if row.num_published_blocks < num_full_blocks:
            yield f"sequence {row.seq_id} has published {row.num_published_blocks} of {num_full_blocks} prompt blocks"


def every_host_block_is_somewhere(snapshot: SchedulerSnapshot) -> Iterator[str]:
    """INV-11: each host block is free or in the queue, and in the queue if and only if it has a digest, its own."""
    free, queue, digests, _ = snapshot.host
    if sorted(free + queue) != list(range(snapshot.config.num_host_blocks)):
        yield f"INV-11: of the host blocks, {free} are free and {queue} in the queue"
    named = {block for block, digest in enumerate(digests) if digest}
    if named != set(queue) or len({digests[block] for block in named}) != len(named):
        yield f"INV-11: host blocks {queue} are in the queue, {named} have digests, of all {digests}"


def progress(before: SchedulerSnapshot, after: SchedulerSnapshot) -> list[str]:
    """INV-7: work exists before `plan` -> a plan is in flight after it.

    What could not go on even alone has been finished as UNSERVICEABLE by the commit before.
    """
    if (before.rows or before.queue) and after.plan is None:
        return [f"INV-7: {len(before.rows)} running and {len(before.queue)} queued sequences, and no plan"]
    return []


def restored(before: SchedulerSnapshot, after: SchedulerSnapshot) -> list[str]:
    """INV-9: abort(plan) restores the snapshot, when nothing was added or cancelled meanwhile."""
    fields = SchedulerSnapshot.__slots__
    return [
        f"INV-9: {name} was {getattr(before, name)} and is {getattr(after, name)}"
        for name in fields
        if getattr(before, name) != getattr(after, name)
    ]
