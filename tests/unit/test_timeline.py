"""The standard metrics of a load test, on a timeline short enough to compute by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from service.bench.load import due_times_s
from service.bench.load_report import html_report, json_report, text_report
from service.bench.timeline import UNFINISHED, RequestTimeline, load_report
from service.report.capacity import Capacity, capacities
from service.report.latency_limits import LatencyLimits
from service.sim.arrivals import Arrivals, GammaArrivals, OnOffArrivals, PoissonArrivals
from service.sim.lengths import parse_lengths
from tests.unit.pages import captions, parsed_page

TIMELINES = [
    # Three chunks with four tokens: TTFT 0.5, gaps 0.5 and 1.0, E2EL 2.0, TPOT 1.5 / 3.
    RequestTimeline(
        10.0,
        [10.5, 11.0, 12.0],
        [1, 1, 2],
        prompt_tokens=7,
        cached_prompt_tokens=4,
        output_tokens=4,
        end_s=12.25,
        tenant="a",
    ),
    # One token: TTFT and E2EL 0.25, no gap, no TPOT.
    RequestTimeline(
        11.0, [11.25], [1], prompt_tokens=3, cached_prompt_tokens=2, output_tokens=1, end_s=11.5, tenant="b"
    ),
    # Two chunks: TTFT 1.0, gap 0.25, E2EL 1.25, TPOT 0.25.
    RequestTimeline(12.0, [13.0, 13.25], [1, 1], prompt_tokens=5, output_tokens=2, end_s=13.5, tenant="a"),
    RequestTimeline(12.0, end_s=12.5, error="RESOURCE_EXHAUSTED"),
    RequestTimeline(13.0, [13.75], [1], end_s=14.0, error=UNFINISHED),
]


def test_metrics_are_those_of_the_definitions() -> None:
    report = load_report("", 1.0, 7, TIMELINES, LatencyLimits(ttft_ms=500, tpot_ms=500))
    assert report.requests == {
        "planned": 7,
        "sent": 5,
        "completed": 3,
        "failed": 1,
        "unfinished": 1,
        "good": 2,
    }
    assert report.errors == {"RESOURCE_EXHAUSTED": 1, UNFINISHED: 1}
    assert report.duration_s == 4.0
    assert {tenant: ttft["mean"] for tenant, ttft in report.tenant_ttft_ms.items()} == {"a": 750.0, "b": 250.0}
    assert report.tokens == {"prompt": 15, "cached_prompt": 6, "output": 7}
    assert report.throughput == {
        "requests_per_s": 3 / 4,
        "output_tokens_per_s": 7 / 4,
        "total_tokens_per_s": 22 / 4,
    }
    assert report.goodput == {"requests_per_s": 2 / 4, "share": 2 / 5}
    latency = report.latency_ms
    assert latency["ttft"]["mean"] == pytest.approx((500 + 250 + 1000) / 3)
    assert latency["ttft"]["median"] == pytest.approx(500)
    assert latency["ttft"]["p90"] == pytest.approx(900)  # four fifths of the way from 500 to 1000
    assert latency["ttft"]["max"] == pytest.approx(1000)
    assert latency["tpot"]["mean"] == pytest.approx((500 + 250) / 2)
    assert latency["tpot"]["std"] == pytest.approx(125)
    assert latency["itl"]["mean"] == pytest.approx((500 + 1000 + 250) / 3)
    assert latency["itl"]["p99"] == pytest.approx(990)
    assert latency["e2el"]["mean"] == pytest.approx((2000 + 250 + 1250) / 3)


@pytest.mark.parametrize(
    ("first_token_s", "cut_after_s", "judged_share"),
    [
        (None, 0.5, 1.0),  # it may have had its token in time
        (None, 0.75, 0.5),
        (0.5, 2.0, 1.0),  # it may have ended in time
        (0.5, 2.25, 0.5),
        (0.75, 1.0, 0.5),  # it had its token too late
    ],
)
def test_request_that_was_cut_off_counts_against_the_capacity_once_it_has_broken_a_limit(
    first_token_s: float | None, cut_after_s: float, judged_share: float
) -> None:
    chunk_times_s = [] if first_token_s is None else [first_token_s]
    cut = RequestTimeline(0.0, chunk_times_s, [1] * len(chunk_times_s), end_s=cut_after_s, error=UNFINISHED)
    good = RequestTimeline(0.0, [0.25], [1], 3, output_tokens=1, end_s=0.25)
    limits = LatencyLimits(ttft_ms=500, e2el_ms=2000)
    report = load_report("", 1.0, 2, [good, cut], limits)
    assert report.judged_share == judged_share
    assert report.goodput["share"] == 0.5  # of all that were sent
    assert load_report("", 1.0, 2, [cut], limits).judged_share == (None if judged_share == 1.0 else 0.0)
    assert load_report("", 1.0, 2, [good, cut], LatencyLimits(itl_p99_ms=1)).judged_share == 1.0


def test_sweep_whose_lowest_rate_was_cut_off_has_the_capacity_of_its_others() -> None:
    """Each request takes 5 s, and 60 s are measured: those of the last 5 are cut off, at every rate."""
    limits = LatencyLimits(ttft_ms=500, e2el_ms=10_000)
    reports = []
    for rate in (1, 4):
        starts_s = [number / rate for number in range(60 * rate)]
        ended = [
            RequestTimeline(s, [s + 0.25, s + 5], [1, 1], 9, output_tokens=2, end_s=s + 5) for s in starts_s if s <= 55
        ]
        cut = [RequestTimeline(s, [s + 0.25], [1], end_s=60.0, error=UNFINISHED) for s in starts_s if s > 55]
        reports.append(load_report("", float(rate), 60 * rate, ended + cut, limits))
    assert [report.goodput["share"] for report in reports] == [56 / 60, 221 / 240]
    assert capacities(reports, limits) == [Capacity("", 4.0, 4.0)]


def test_peaks_count_whole_seconds_and_calls_in_flight() -> None:
    """Chunks by second from 10 on: one, two, one, three; tokens: 1, 2, 2, 3. At 12.0 three calls are in flight."""
    report = load_report("", 1.0, 5, TIMELINES, LatencyLimits())
    assert report.peak == {"concurrency": 3.0, "output_tokens_per_s": 3.0, "output_chunks_per_s": 3.0}
    assert report.series["output_tokens_per_s"] == [(0.5, 1.0), (1.5, 2.0), (2.5, 2.0), (3.5, 3.0)]


@pytest.mark.parametrize("num_requests", [255, 256, 257, 512, 3000])
def test_picture_of_a_long_run_keeps_its_peak_and_its_end(num_requests: int) -> None:
    """One call at a time, two points each, but that call 101 starts before call 100 has ended."""
    timelines = [
        RequestTimeline(float(i), [i + 0.25], [1], 1, 1, end_s=i + (1.25 if i == 100 else 0.5))
        for i in range(num_requests)
    ]
    report = load_report("", 1.0, num_requests, timelines, LatencyLimits())
    points = report.series["concurrency"]
    assert max(value for _, value in points) == report.peak["concurrency"] == 2.0
    assert points[0] == (0.0, 1.0) and points[-1] == (num_requests - 0.5, 0.0)
    assert points == sorted(points) and min(2 * num_requests, 258) <= len(points) <= 512


def test_call_that_ends_well_without_a_token_has_failed() -> None:
    report = load_report("", 1.0, 1, [RequestTimeline(0.0, end_s=1.0)], LatencyLimits())
    assert report.requests["failed"] == 1
    assert report.errors == {"no token": 1}
    assert set(report.latency_ms["ttft"].values()) == {None}


def test_calls_one_after_the_other_are_never_two_in_flight() -> None:
    timelines = [RequestTimeline(float(i), [i + 0.5], [1], 1, 1, end_s=i + 1.0) for i in range(3)]
    assert load_report("", 1.0, 3, timelines, LatencyLimits()).peak["concurrency"] == 1


def test_due_times_end_where_the_rate_says() -> None:
    times = due_times_s(PoissonArrivals(4.0), 4.0, 100, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(25.0)
    assert times == due_times_s(PoissonArrivals(4.0), 4.0, 100, seed=1)
    assert due_times_s(None, math.inf, 3, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("lengths", ["lognormal:128:0.7", "uniform:1:1000"])
@pytest.mark.parametrize("arrivals", [PoissonArrivals(1.0), GammaArrivals(1.0, 0.5), GammaArrivals(1.0, 2.0)])
def test_when_a_request_is_due_says_nothing_of_its_length(arrivals: Arrivals, lengths: str) -> None:
    """Of 400 loads, each with its seed, the logarithms of the first gap and of the first lengths.

    Independent ones correlate by chance, with a deviation of 1 / sqrt(400) = 0.05.
    """
    pairs = []
    for seed in range(400):
        first_s, *_, last_s = due_times_s(arrivals, 1.0, 20, seed)
        assert last_s == pytest.approx(20.0)
        pairs.append([first_s, *parse_lengths(lengths).draw(np.random.default_rng(seed), 4).tolist()])
    correlations = np.corrcoef(np.log(pairs), rowvar=False)[0, 1:]
    assert np.abs(correlations).max() < 0.2


def test_bursts_last_as_long_as_they_are_asked_to() -> None:
    """4 a second for one second in four: none is due in the three seconds of silence, however many are sent."""
    for num_requests in (3, 7, 40):
        times = due_times_s(OnOffArrivals(1.0, on_s=1.0, off_s=3.0), 1.0, num_requests, seed=1)
        assert len(times) == num_requests
        assert all(time_s % 4 < 1 for time_s in times)


def test_arrivals_so_bursty_that_all_come_at_once_are_due_at_once() -> None:
    """A gap of shape 1/1000 is 0 almost as often as not."""
    first_gaps_s = [np.random.default_rng((seed, 1)).gamma(1e-3, 1e3) for seed in range(4)]
    dues_s = [due_times_s(GammaArrivals(1.0, 1e-3), 1.0, 1, seed) for seed in range(4)]
    assert 0.0 in first_gaps_s and max(first_gaps_s) > 1e-300
    assert dues_s == [[pytest.approx(1.0) if gap_s else 0.0] for gap_s in first_gaps_s]


def test_arrivals_too_early_to_be_scaled_are_due_when_they_come() -> None:
    """Of the gaps that are not 0 some are so small that no number says how many of them make a second."""
    gaps_s = {seed: np.random.default_rng((seed, 1)).gamma(1e-3, 1e3) for seed in range(300)}
    least = [(seed, gap_s) for seed, gap_s in gaps_s.items() if 0 < gap_s < 1e-309]
    assert least
    for seed, gap_s in least:
        assert due_times_s(GammaArrivals(1.0, 1e-3), 1.0, 1, seed) == [gap_s]


def test_what_was_not_measured_is_shown_as_such() -> None:
    """Answers of one token, all of tenant `a`, have no TPOT and no gap; the one that `b` asked for has failed."""
    answered = RequestTimeline(0.0, [0.5], [1], prompt_tokens=3, output_tokens=1, end_s=1.0, tenant="a")
    failed = RequestTimeline(0.0, end_s=1.0, error="RESOURCE_EXHAUSTED", tenant="b")
    reports = [load_report("", rate, 2, [answered, failed], LatencyLimits()) for rate in (1.0, 2.0)]
    shown = [line.split() for line in text_report(reports[:1], LatencyLimits()).splitlines()[-6:]]
    half_a_second = ["500.00", "500.00", "0.00", *4 * ["500.00"]]
    assert shown == [
        ["TTFT", *half_a_second],
        ["TPOT", *7 * ["-"]],
        ["ITL", *7 * ["-"]],
        ["E2EL", *half_a_second],
        ["TTFT", *half_a_second, "of", "a"],
        ["TTFT", *7 * ["-"], "of", "b"],
    ]
    (run, _) = json.loads(json_report("", reports, LatencyLimits()))["runs"]
    assert set(run["latency_ms"]["itl"].values()) == set(run["tenant_ttft_ms"]["b"].values()) == {None}
    cells = [cell.text for cell in parsed_page(html_report("", reports, LatencyLimits())).iter("td")]
    assert cells[11:17] == ["500", "500", "-", "-", "-", "500"]  # the first run's latencies


def test_a_run_that_completed_nothing_has_no_latencies() -> None:
    nothing = [timeline for timeline in TIMELINES if timeline.error]
    text = text_report([load_report("", 1.0, len(nothing), nothing, LatencyLimits())], LatencyLimits())
    lines = [line.split() for line in text.splitlines()]
    assert [line[1:] for line in lines if line[0] == "TTFT"] == [["-"] * 7]


def test_reports_of_a_sweep_say_the_same_in_three_forms() -> None:
    reports = [load_report("", rate, 7, TIMELINES, LatencyLimits()) for rate in (1.0, math.inf)]
    limits = LatencyLimits(ttft_ms=1e4)
    document = json.loads(json_report("command", reports, limits))
    none = {"rate_90_percent_good": None, "rate_99_percent_good": None, "rate_unit": "requests/s"}
    assert document["capacity"] == [{"name": ""} | none]
    assert [run["rate"] for run in document["runs"]] == [1.0, None]
    assert document["runs"][0]["latency_ms"]["e2el"]["max"] == 2000
    text = text_report(reports, LatencyLimits())
    assert "1 requests/s: 3 of 5 completed, 1 failed, 1 unfinished in 4.00 s, 1 RESOURCE_EXHAUSTED; " in text
    assert "; 2 of 7 planned were never sent\n" in text
    assert "good" not in text
    assert "  good: 3, 60.0%, 0.75/s; peak: " in text_report(reports, limits)
    answered = load_report("", 2.0, 3, TIMELINES[:3], limits)
    text = text_report([answered], limits)
    assert "never sent" not in text
    assert text.splitlines()[-1] == ("highest rate with 90 % good: 2 requests/s, with 99 % good: 2 requests/s")
    (line, *_) = text_report([replace(answered, rate_unit="times the trace's rate")], limits).splitlines()
    assert line.startswith("2 times the trace's rate: ")
    root = parsed_page(html_report("chairlift bench serve", reports, LatencyLimits(ttft_ms=1)))
    assert captions(root) == [
        "TTFT p99",
        "TPOT p99",
        "E2EL p99",
        "E2EL median",
        "Requests in flight",
        "Output tokens",
        "Time to first token",
        "Time per output token",
        "Inter-token latency",
        "End-to-end latency",
    ]
