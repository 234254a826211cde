"""Router, autoscaler, fairness, histogram, time series and step times of the simulator."""

import json
import math
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from service.errors import ConfigError
from service.sim.autoscaler import Autoscaler, AutoscaleRule
from service.sim.fairness import ServiceShares, jain_index
from service.sim.histogram import LogHistogram
from service.sim.latency import H200_LIKE, MeasuredStep, StepLatency, fit_latency, load_latency
from service.sim.router import LeastLoaded, PrefixAffinity, RoundRobin, router_named
from service.sim.series import TimeSeries
from service.sim.workload import SimRequest, Tenant

S = 1_000_000_000


@dataclass
class Loaded:
    """A replica with a load."""

    number: int
    num_live: int = 0


def request(prefix: int = -1) -> SimRequest:
    return SimRequest(0, 0, prompt_tokens=10, output_tokens=1, prefix=prefix)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    replicas = [Loaded(0), Loaded(1), Loaded(2)]
    assert [router.choose(request(), replicas) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_first_of_the_emptiest() -> None:
    replicas = [Loaded(0, 4), Loaded(1, 2), Loaded(2, 2)]
    assert LeastLoaded().choose(request(), replicas) == 1


def test_prefix_affinity_keeps_a_prefix_together_and_spreads_prefixes() -> None:
    router = PrefixAffinity()
    replicas = [Loaded(number, 5) for number in range(4)]
    chosen = [router.choose(request(prefix), replicas) for prefix in range(400)]
    assert chosen == [router.choose(request(prefix), replicas) for prefix in range(400)]
    assert min(chosen.count(index) for index in range(4)) > 70


def test_prefix_affinity_moves_only_the_prefixes_of_a_replica_that_left() -> None:
    router = PrefixAffinity()
    before = [Loaded(number, 5) for number in range(4)]
    after = [replica for replica in before if replica.number != 2]
    for prefix in range(100):
        old = before[router.choose(request(prefix), before)].number
        new = after[router.choose(request(prefix), after)].number
        assert old in {new, 2}


def test_prefix_affinity_passes_over_an_overloaded_replica() -> None:
    router = PrefixAffinity(max_imbalance=1.5)
    replicas = [Loaded(0), Loaded(1)]
    home = router.choose(request(7), replicas)
    replicas[home].num_live = 32  # 1.5 times the mean of 16, and 8
    assert router.choose(request(7), replicas) == home
    replicas[home].num_live = 33
    assert router.choose(request(7), replicas) == 1 - home
    assert router.choose(request(), replicas) == 1 - home


def test_unknown_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="random"):
        router_named("random")


def test_autoscaler_grows_at_once_and_shrinks_after_the_cooldown() -> None:
    scaler = Autoscaler(AutoscaleRule(1, 5, target_load=10, interval_s=10, cooldown_s=30))
    assert scaler.decide(0, num_live=35, num_replicas=1) == 4
    assert scaler.decide(10, num_live=5, num_replicas=4) == 4  # 35 live requests are 10 s ago
    assert scaler.decide(20, num_live=15, num_replicas=4) == 4
    assert scaler.decide(30, num_live=5, num_replicas=4) == 4
    assert scaler.decide(40, num_live=5, num_replicas=4) == 2  # the most of the last 30 s
    assert scaler.decide(90, num_live=0, num_replicas=2) == 1
    assert scaler.decide(100, num_live=1000, num_replicas=1) == 5


def test_autoscaler_keeps_those_of_the_start_for_the_cooldown() -> None:
    scaler = Autoscaler(AutoscaleRule(1, 8, target_load=64, interval_s=15, cooldown_s=300))
    decided = [scaler.decide(now_s, num_live=0, num_replicas=8) for now_s in range(15, 301, 15)]
    assert decided == [8] * 20
    assert scaler.decide(315, num_live=0, num_replicas=8) == 1


@pytest.mark.parametrize(
    ("least", "most", "load"),
    [(0, 1, 1), (2, 1, 1), (1, 1, 0), (1, 8, 1e-320), (1, 8, 0.9e-6), (1, 8, math.inf), (1, 8, math.nan)],
)
def test_autoscale_rule_without_sense_is_refused(least: int, most: int, load: float) -> None:
    with pytest.raises(ConfigError):
        AutoscaleRule(least, most, load)


def test_jain_index_of_known_shares() -> None:
    assert jain_index(np.array([3.0, 3.0, 3.0])) == pytest.approx(1.0)
    assert jain_index(np.array([5.0, 0.0, 0.0, 0.0])) == pytest.approx(1 / 4)
    assert jain_index(np.array([1.0, 2.0])) == pytest.approx(9 / 10)


def test_fairness_counts_only_tenants_that_waited_all_along() -> None:
    """In the first window nobody has waited from its start. In the second a and b have, and got 100 and 200 tokens;
    c waited for a while only. In the third only a did.
    """
    shares = ServiceShares([Tenant("a"), Tenant("b"), Tenant("c")])
    for tenant in (0, 0, 1, 2):
        shares.on_waiting(tenant, 1)
    shares.on_step(10 * S, np.array([0]), np.array([999], np.int32))
    shares.on_waiting(2, -1)
    shares.on_step(20 * S, np.array([0, 1, 2]), np.array([100, 200, 5000], np.int32))
    assert (shares.num_windows, shares.index) == (1, pytest.approx(300**2 / (2 * (100**2 + 200**2))))
    shares.on_waiting(1, -1)
    shares.on_step(30 * S, np.array([0, 1]), np.array([1, 1], np.int32))
    assert shares.num_windows == 1
    assert shares.totals.tolist() == [1100, 201, 5000]


def test_fairness_without_two_tenants_that_wait_has_no_index() -> None:
    shares = ServiceShares([Tenant("a"), Tenant("b")])
    shares.on_waiting(0, 1)
    shares.on_step(10 * S, np.array([0, 1]), np.array([3, 1], np.int32))
    shares.on_step(20 * S, np.array([0, 1]), np.array([3, 1], np.int32))
    assert (shares.num_windows, shares.index) == (0, None)


def test_fairness_divides_by_weight() -> None:
    shares = ServiceShares([Tenant("a", weight=1), Tenant("b", weight=2)])
    for tenant in (0, 1):
        shares.on_waiting(tenant, 1)
    shares.on_step(10 * S, np.array([0]), np.array([1], np.int32))
    shares.on_step(20 * S, np.array([0, 1]), np.array([100, 200], np.int32))
    assert shares.index == pytest.approx(1.0)


def test_histogram_quantiles_are_within_a_bucket_of_the_exact_ones() -> None:
    values = np.random.default_rng(0).lognormal(3, 1.5, 50_000)
    histogram = LogHistogram()
    histogram.add_all(values[:30_000])
    for value in values[30_000:].tolist():
        histogram.add(value)
    assert histogram.count == 50_000
    assert histogram.mean == pytest.approx(values.mean())
    assert histogram.std == pytest.approx(values.std())
    assert histogram.largest == values.max()
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.02)


def test_deviation_of_values_that_differ_little_and_lie_far_from_zero() -> None:
    histogram = LogHistogram()
    for number in range(3):
        histogram.add_all(np.array([1e9, 1e9 + 1.0] * 4000))
        histogram.add(1e9 + number)
    values = [0.0, 1.0] * 12_000 + [0.0, 1.0, 2.0]  # above 1e9
    assert histogram.mean == pytest.approx(1e9 + np.mean(values), abs=1e-6)
    assert histogram.std == pytest.approx(np.std(values), rel=1e-6)


def test_histogram_of_one_value_and_of_none() -> None:
    histogram = LogHistogram()
    assert histogram.summary() == dict.fromkeys(("mean", "median", "std", "p90", "p95", "p99", "max"))
    histogram.add(0.0)
    assert histogram.quantile(0.5) == 0.0
    single = LogHistogram()
    single.add(42.0)
    assert single.summary() == {"mean": 42, "median": 42, "std": 0, "p90": 42, "p95": 42, "p99": 42, "max": 42}


def test_histogram_has_zeros_for_quantiles_where_zeros_were_seen() -> None:
    histogram = LogHistogram()
    histogram.add_all(np.array([0.0, 0.0, 0.0, 8.0]))
    assert (histogram.quantile(0.75), histogram.quantile(1.0)) == (0.0, 8.0)


def test_arrays_of_nothing_leave_nothing_in_a_histogram() -> None:
    histogram = LogHistogram()
    histogram.add(1.0)
    tracemalloc.start()
    for _ in range(10_000):
        histogram.add_all(np.zeros(4)[4:])  # a view of 100 bytes and more
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes < 100_000
    assert (histogram.count, histogram.mean) == (1, 1.0)


def test_series_keeps_the_mean_however_long_time_gets() -> None:
    series = TimeSeries()
    series.add(0, 3 * S, 10.0)
    series.add(3 * S, 4 * S, 2.0)
    series.add(1000 * S, 1004 * S, 0.0)
    assert series.mean == pytest.approx((30 + 2) / 8)
    assert series.largest == 10.0
    points = series.points()
    assert len(points) <= 512
    assert points[0] == (pytest.approx(1.024), pytest.approx((10 * 2.048) / 2.048))


def test_series_ignores_what_took_no_time() -> None:
    series = TimeSeries()
    series.add(2 * S, 2 * S, 9.0)
    series.add(3 * S, 2 * S, 9.0)
    assert (series.largest, series.mean, series.points()) == (0.0, 0.0, [])


def test_series_splits_a_value_over_its_bins() -> None:
    series = TimeSeries()
    series.add(500_000, 1_500_000, 4.0)
    series.add(1_500_000, 2_000_000, 0.0)
    assert series.points() == [(0.0005, 4.0), (0.0015, 2.0)]


def test_step_times_follow_the_formula() -> None:
    latency = StepLatency(100, prefill_token_ns=3, decode_row_ns=10, context_token_ns=0.5, weights_ns=50)
    assert latency.step_ns(2, 1, 40) == 100 + 50 + 20
    assert latency.step_ns(100, 2, 0) == 100 + 320


def test_fit_finds_the_model_that_made_the_steps() -> None:
    made = StepLatency(2e6, prefill_token_ns=30e3, decode_row_ns=50e3, context_token_ns=40)
    cases = [(0, 1, 64), (0, 16, 8192), (0, 64, 32768), (512, 4, 2048), (128, 0, 0), (0, 16, 1024)]
    steps = [MeasuredStep(*case, step_ns=made.step_ns(*case)) for case in cases]
    fitted = fit_latency(steps)
    assert fitted.overhead_ns == pytest.approx(made.overhead_ns, rel=1e-3)
    assert fitted.prefill_token_ns == pytest.approx(made.prefill_token_ns, rel=1e-3)
    assert fitted.decode_row_ns == pytest.approx(made.decode_row_ns, rel=1e-3)
    assert fitted.context_token_ns == pytest.approx(made.context_token_ns, rel=1e-3)


def test_fit_never_has_a_negative_cost() -> None:
    """Larger batches were measured faster, as noise may have it."""
    steps = [MeasuredStep(0, 1, 64, 5e6), MeasuredStep(0, 4, 256, 4.9e6), MeasuredStep(0, 16, 1024, 4.8e6)]
    fitted = fit_latency(steps)
    assert (fitted.decode_row_ns, fitted.context_token_ns) == (0.0, 0.0)
    assert fitted.overhead_ns == pytest.approx(4.9e6, rel=0.02)


def test_step_times_come_from_a_profile_an_object_or_measured_steps(tmp_path: Path) -> None:
    assert load_latency("h200-like") is H200_LIKE
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"overhead_ns": 1e6, "prefill_token_ns": 2, "decode_row_ns": 3, "context_token_ns": 4}))
    assert load_latency(str(path)) == StepLatency(1e6, 2, 3, 4)
    cases = [{"batch": b, "context": c, "step_ms": 5 + 0.5 * b} for b in (1, 4, 16) for c in (64, 512)]
    path.write_text(json.dumps(cases))
    fitted = load_latency(str(path))
    assert (fitted.overhead_ns, fitted.decode_row_ns) == (pytest.approx(5e6), pytest.approx(0.5e6))
    assert fitted.prefill_token_ns == fitted.decode_row_ns


@pytest.mark.parametrize(
    "text",
    [
        *("x", "3", '{"overhead": 1}', '{"overhead_ns": "x"}', "[]", "[1, 2]", '[{"batch": 1}]'),
        f'{{"overhead_ns": 1{"0" * 400}}}',
        f'[{{"batch": 1{"0" * 400}, "context": 1, "step_ms": 1}}, {{"batch": 1, "context": 1, "step_ms": 1}}]',
        '[{"batch": Infinity, "context": 1, "step_ms": 1}]',
    ],
)
def test_step_times_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_latency(str(path))


@pytest.mark.parametrize(
    ("times", "complaint"),
    [
        ({"a": 1}, "a: no step times; those are overhead_ns, prefill_token_ns, "),
        ({"overhead_ns": 1, "decode_row_ns": 1}, "lacks prefill_token_ns, context_token_ns$"),
        (
            {"overhead_ns": "1", "prefill_token_ns": 1, "decode_row_ns": 1, "context_token_ns": 1},
            'overhead_ns is "1", but must be a number of nanoseconds',
        ),
    ],
)
def test_step_times_that_are_none_are_named(times: dict[str, object], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(times))
    with pytest.raises(ConfigError, match=rf"times\.json: {complaint}"):
        load_latency(str(path))


def test_file_of_step_times_that_is_missing_is_named_with_the_profiles() -> None:
    with pytest.raises(ConfigError, match="nowhere: no such file, and no profile; profiles: h200-like"):
        load_latency("nowhere")


def test_h200_profile_has_the_figures_of_its_derivation() -> None:
    """16 GB of weights at 3.84 TB/s, and a KV buffer of 131,072 bytes a token."""
    assert H200_LIKE.step_ns(0, 1, 0) == pytest.approx(4.48e6, rel=0.01)
    assert H200_LIKE.step_ns(8192, 0, 0) == pytest.approx(0.3e6 + 8192 * 2 * 8.03e9 / 650e12 * 1e9, rel=0.001)
    assert H200_LIKE.context_token_ns == pytest.approx(34.1, abs=0.1)
