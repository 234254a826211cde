"""Simulations that a reader can compute by hand."""

from dataclasses import replace

import pytest

from service.core.scheduler_config import SchedulerConfig
from service.report.latency_limits import LatencyLimits
from service.sim.arrivals import PoissonArrivals
from service.sim.autoscaler import AutoscaleRule
from service.sim.latency import StepLatency
from service.sim.lengths import FixedLength, SeparateLengths
from service.sim.metrics import Collector
from service.sim.run import Deployment, Simulation
from service.sim.workload import SimRequest, Tenant, Workload

MS = 1_000_000
CONFIG = SchedulerConfig(num_blocks=101, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
LATENCY = StepLatency(1 * MS, prefill_token_ns=0.1 * MS, decode_row_ns=0.5 * MS, context_token_ns=0)
ONE = (Tenant("one"),)


def simulate(*requests: SimRequest, limits: LatencyLimits | None = None, **changes: object) -> Collector:
    deployment = replace(Deployment(CONFIG, LATENCY), **changes)  # type: ignore[arg-type]
    return Simulation(deployment, ONE, limits or LatencyLimits()).run(requests)


def test_two_requests_share_steps_as_computed_by_hand() -> None:
    """Step 1, 0 to 2 ms: the first prompt, 1 + 10 * 0.1. Step 2, to 3.9 ms: its second token and the other prompt,
    1 + 0.5 + 4 * 0.1. Step 3, to 5.9 ms: two decode rows, 1 + 2 * 0.5, and both are done.
    """
    measured = simulate(
        SimRequest(0, 0, prompt_tokens=10, output_tokens=3),
        SimRequest(round(1.5 * MS), 0, prompt_tokens=4, output_tokens=2),
        limits=LatencyLimits(ttft_ms=2.0, tpot_ms=3.0),
    )
    totals = measured.totals
    assert (totals.arrived, totals.completed, totals.good, totals.steps) == (2, 2, 1, 3)
    assert (totals.prompt_tokens, totals.output_tokens, totals.end_ns) == (14, 5, round(5.9 * MS))
    assert measured.ttft.mean == pytest.approx((2.0 + 2.4) / 2)
    assert measured.queue_wait.mean == pytest.approx((0.0 + 0.5) / 2)
    assert measured.e2el.mean == pytest.approx((5.9 + 4.4) / 2)
    assert measured.tpot.mean == pytest.approx((3.9 / 2 + 2.0) / 2)
    assert (measured.itl.count, measured.itl.mean) == (3, pytest.approx((1.9 + 2.0 + 2.0) / 3))
    assert measured.batch_size.mean == pytest.approx((2.0 * 1 + 1.9 * 2 + 2.0 * 2) / 5.9)


def test_context_tokens_and_the_floor_of_the_weights_count() -> None:
    """A prompt of 4 costs max(3, 0.4) + 0, its one decode step max(3, 0.5) + 4 * 0.25: 3 + 4 ms."""
    latency = StepLatency(0, 0.1 * MS, 0.5 * MS, context_token_ns=0.25 * MS, weights_ns=3 * MS)
    measured = simulate(SimRequest(0, 0, prompt_tokens=4, output_tokens=2), latency=latency)
    assert measured.totals.end_ns == 7 * MS


def test_copies_to_host_memory_and_back_take_their_time() -> None:
    """Of three prompts of 9 tokens the third begins like the first, whose two blocks the second one's three pushed out.

    The first takes 1 + 9 * 0.1 ms. The second as much, and two copies of 0.05 ms out. The third has one token to
    compute, which counts as a decode row: 1 + 0.5 ms; two blocks come back, and those of the second one go.
    """
    config = replace(CONFIG, num_blocks=4, num_host_blocks=4, host_block_ns=0.05 * MS)
    requests = (SimRequest(number * 10 * MS, 0, 9, 1, prefix=number % 2, prefix_tokens=8) for number in range(3))
    measured = simulate(*requests, scheduler=config)
    assert measured.e2el.mean == pytest.approx((1.9 + 1.9 + 0.1 + 1.5 + 0.2) / 3)


def test_requests_of_one_moment_share_their_first_step() -> None:
    measured = simulate(*(SimRequest(0, 0, prompt_tokens=2, output_tokens=1) for _ in range(3)))
    assert (measured.totals.steps, measured.totals.end_ns) == (1, round(1.6 * MS))


def test_idle_time_counts_as_an_empty_batch() -> None:
    """One request from 0 to 1.2 ms, the next from 6 to 7.2 ms: one sequence for 2.4 of 7.2 ms."""
    measured = simulate(SimRequest(0, 0, 2, 1), SimRequest(6 * MS, 0, 2, 1))
    assert measured.batch_size.mean == pytest.approx(2.4 / 7.2)


def test_blocks_are_taken_while_the_step_that_ends_a_request_runs() -> None:
    """Ten tokens in three of 100 blocks, for the whole of the 2 ms."""
    measured = simulate(SimRequest(0, 0, 10, 1))
    assert (measured.kv_occupancy.mean, measured.kv_occupancy.largest) == (pytest.approx(0.03), pytest.approx(0.03))


def test_replica_that_nobody_asks_counts_as_empty() -> None:
    """Of four replicas one serves one sequence, in two blocks of 100, all the time."""
    measured = simulate(SimRequest(0, 0, 5, 1), num_replicas=4)
    assert measured.batch_size.mean == pytest.approx(1 / 4)
    assert measured.kv_occupancy.mean == pytest.approx(0.02 / 4)
    assert measured.batch_size.points() == [(0.0005, 0.25), (0.0015, 0.25)]


def test_replica_is_measured_from_its_join_to_its_end() -> None:
    """Requests of 20 ms one at a time, six of them at once, one at 200 ms, all on the first replica. Of the two that
    are ordered at 10 ms and join at 30, one goes at 80 ms, as two requests are left, and one at 100.
    """
    config, latency = replace(CONFIG, max_num_seqs=1), StepLatency(20 * MS, 0, 0, 0)
    rule = AutoscaleRule(1, 3, target_load=1, interval_s=0.01, startup_s=0.02, cooldown_s=0.0)
    requests = [*(SimRequest(0, 0, 2, 1) for _ in range(6)), SimRequest(200 * MS, 0, 2, 1)]
    measured = simulate(*requests, scheduler=config, latency=latency, autoscale=rule)
    assert measured.batch_size.mean == pytest.approx(7 * 20 / (220 + 50 + 70))
    assert measured.replicas.mean == pytest.approx((220 + 50 + 70) / 220)


def test_queue_obeys_littles_law() -> None:
    """Requests that wait, on average over time: their rate times their mean wait."""
    workload = Workload(PoissonArrivals(900), SeparateLengths(FixedLength(8), FixedLength(4)), num_requests=500)
    for changes in (
        {"batching": "continuous"},
        {"batching": "static", "prefix_cache": False},
        {"batching": "dynamic", "batch_window_ns": 5 * MS, "prefix_cache": False},
    ):
        scheduler = replace(CONFIG, **changes)  # type: ignore[arg-type]
        measured = simulate(*workload.requests(), scheduler=scheduler, num_replicas=2)
        queue_ms = measured.queue_wait.mean * measured.queue_wait.count
        assert 2 * measured.waiting.mean == pytest.approx(queue_ms * MS / measured.totals.end_ns)


def test_time_begins_with_the_first_arrival() -> None:
    """As a trace that was cut out of a longer one has it."""
    rule = AutoscaleRule(1, 8, target_load=1, interval_s=0.01, cooldown_s=0.05)
    early, late = (
        simulate(
            *(SimRequest(start_ns + number * 5 * MS, 0, 9, 3) for number in range(20)), num_replicas=8, autoscale=rule
        )
        for start_ns in (0, 5_000_000 * MS)
    )
    assert late.totals.end_ns == early.totals.end_ns == round((95 + 1.9 + 2 * 1.5) * MS)
    for series in ("batch_size", "kv_occupancy", "waiting", "replicas"):
        assert getattr(late, series).points() == getattr(early, series).points()
    assert late.e2el.mean == early.e2el.mean


def test_refused_requests_are_counted_and_forgotten() -> None:
    config = replace(CONFIG, max_num_seqs=1, max_waiting_requests=1)
    measured = simulate(*(SimRequest(number, 0, 2, 1) for number in range(4)), scheduler=config)
    assert (measured.totals.completed, measured.totals.refused) == (2, 2)


def test_request_that_outgrows_the_buffer_fails() -> None:
    config = replace(CONFIG, num_blocks=3)  # eight tokens
    measured = simulate(SimRequest(0, 0, prompt_tokens=6, output_tokens=20), scheduler=config)
    assert (measured.totals.completed, measured.totals.failed) == (0, 1)
    assert [latency.count for latency in (measured.ttft, measured.tpot, measured.e2el)] == [0, 0, 0]


def test_request_that_exceeds_the_context_is_refused_as_by_a_server() -> None:
    context = CONFIG.max_model_len
    fits = SimRequest(0, 0, prompt_tokens=context - 5, output_tokens=5)
    measured = simulate(fits, replace(fits, output_tokens=6), replace(fits, prompt_tokens=1000 * context))
    assert (measured.totals.completed, measured.totals.refused) == (1, 2)
    assert (measured.totals.prompt_tokens, measured.totals.output_tokens) == (context - 5, 5)


def test_two_replicas_serve_two_requests_as_if_alone() -> None:
    requests = [SimRequest(0, 0, 10, 3), SimRequest(0, 0, 10, 3)]
    alone = simulate(requests[0])
    both = simulate(*requests, num_replicas=2, router="round-robin")
    assert both.totals.end_ns == alone.totals.end_ns
    assert both.totals.completed == 2


def test_autoscaler_adds_replicas_after_their_start_up_and_gives_them_up() -> None:
    """Ten requests of 20 ms each, one at a time, at a target of one live request per replica: at 10 ms the rule asks
    for all four; three join at 30 ms. Afterwards the load falls, and the last look finds one replica.
    """
    config = replace(CONFIG, max_num_seqs=1)
    latency = StepLatency(20 * MS, 0, 0, 0)
    rule = AutoscaleRule(1, 4, target_load=1, interval_s=0.01, startup_s=0.02, cooldown_s=0.0)
    requests = [SimRequest(0, 0, 2, 1) for _ in range(10)]
    requests += [SimRequest(number * 40 * MS, 0, 2, 1) for number in range(5, 9)]
    fixed = simulate(*requests, scheduler=config, latency=latency, router="round-robin")
    simulation = Simulation(Deployment(config, latency, 1, "least-loaded", rule), ONE, LatencyLimits())
    scaled = simulation.run(requests)
    assert scaled.totals.completed == fixed.totals.completed == 14
    assert len(simulation.counters) == 4
    assert scaled.replicas.largest == 4
    assert scaled.replicas.points()[-1][1] == 1
    # The first request of a burst is on one replica only: what queued behind it before the others came stays there.
    assert fixed.totals.end_ns == 340 * MS


def test_replicas_count_until_the_last_request_has_ended() -> None:
    """One after the other, 20 ms each: at 10 ms three more are ordered, for 90 ms, when all has ended at 80."""
    config, latency = replace(CONFIG, max_num_seqs=1), StepLatency(20 * MS, 0, 0, 0)
    rule = AutoscaleRule(1, 4, target_load=1, interval_s=0.01, startup_s=0.08)
    simulation = Simulation(Deployment(config, latency, autoscale=rule), ONE, LatencyLimits())
    replicas = simulation.run([SimRequest(0, 0, 2, 1) for _ in range(4)]).replicas
    assert (replicas.mean, replicas.largest) == (1.0, 1.0)
    assert replicas.points()[-1][0] == pytest.approx(0.08, abs=0.001)


def test_run_ends_with_its_last_request_though_it_was_refused() -> None:
    measured = simulate(SimRequest(0, 0, 2, 1), SimRequest(9 * MS, 0, 99, 1))
    assert (measured.totals.refused, measured.totals.end_ns) == (1, 9 * MS)


def test_a_workload_without_requests_ends_at_the_first_look_at_the_load() -> None:
    rule = AutoscaleRule(1, 2, target_load=4, interval_s=0.01)
    simulation = Simulation(Deployment(CONFIG, LATENCY, autoscale=rule), ONE, LatencyLimits())
    assert simulation.run([]).totals.arrived == 0
    assert simulation.num_live == 0


def test_many_requests_leave_nothing_behind() -> None:
    """Memory is bounded: slots of finished requests are used again."""
    workload = Workload(PoissonArrivals(100), SeparateLengths(FixedLength(8), FixedLength(4)), num_requests=3000)
    simulation = Simulation(Deployment(CONFIG, LATENCY), workload.tenants, LatencyLimits())
    measured = simulation.run(workload.requests())
    assert measured.totals.completed == 3000
    assert len(measured.live.tenant) == 1024
    assert simulation.num_live == 0
    counters = simulation.counters[0]
    assert counters.num_free_blocks == counters.num_blocks - 1


def test_prefix_is_computed_once_and_counts_as_a_hit_afterwards() -> None:
    """Two blocks of four are shared. The second request computes its own two tokens only: 1 + 2 * 0.1 ms."""
    requests = [
        SimRequest(at * MS, 0, 10, 1, prefix=prefix, prefix_tokens=8) for at, prefix in ((0, 3), (9, 3), (20, 4))
    ]
    simulation = Simulation(Deployment(CONFIG, LATENCY), ONE, LatencyLimits())
    measured = simulation.run(requests)
    counters = simulation.counters[0]
    assert (counters.totals.num_queried_tokens, counters.totals.num_hit_tokens) == (30, 8)
    assert measured.ttft.mean == pytest.approx((2.0 + 1.2 + 2.0) / 3)


def test_prompts_without_a_prefix_share_nothing() -> None:
    simulation = Simulation(Deployment(CONFIG, LATENCY), ONE, LatencyLimits())
    simulation.run([SimRequest(at * MS, 0, 9, 6) for at in (0, 50, 100)])
    assert simulation.counters[0].totals.num_hit_tokens == 0


def test_static_batch_ends_together_and_who_comes_meanwhile_waits() -> None:
    """Two prompts: 1 + 12 * 0.1 to 2.2 ms. Both rows decode, though one has ended: 2 ms each, to 6.2. Then the third:
    1.2 ms. Continuous batching gives it a row at 2.2 ms already.
    """
    requests = [SimRequest(0, 0, 10, 3), SimRequest(0, 0, 2, 1), SimRequest(1 * MS, 0, 2, 1)]
    static = simulate(*requests, scheduler=replace(CONFIG, batching="static", prefix_cache=False))
    continuous = simulate(*requests)
    assert static.totals.end_ns == round(7.4 * MS)
    assert static.ttft.largest == pytest.approx(6.4)
    assert static.batch_size.mean == pytest.approx((2.2 * 2 + 4.0 * 1 + 1.2 * 1) / 7.4)
    assert continuous.ttft.largest == pytest.approx(2.2 + 1.7 - 1.0)


def test_dynamic_batch_begins_when_its_window_has_passed_or_when_it_is_full() -> None:
    config = replace(CONFIG, batching="dynamic", batch_window_ns=5 * MS, max_num_seqs=2, prefix_cache=False)
    lonely = simulate(SimRequest(0, 0, 2, 1), scheduler=config)
    assert lonely.totals.end_ns == round(6.2 * MS)
    assert lonely.waiting.mean == pytest.approx(5 / 6.2)
    full = simulate(SimRequest(0, 0, 2, 1), SimRequest(1 * MS, 0, 2, 1), scheduler=config)
    assert full.totals.end_ns == round(2.4 * MS)
