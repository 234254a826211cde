"""The highest rates of a sweep that keep the limits."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from service import cli
from service.report.capacity import Capacity, capacities, capacity_parts, capacity_text
from service.report.latency_limits import LatencyLimits, parse_limits
from tests.unit.measured_run import Run

LIMITS = LatencyLimits(ttft_ms=500)


def run(rate: float, num_good: int, itl_p99_ms: float | None = 0.0, name: str = "") -> Run:
    """At this rate so many of 200 requests were good, and the ITL p99 was so long."""
    return Run(rate, name, judged_share=num_good / 200, latency_ms={"itl": {"p99": itl_p99_ms}})


@pytest.mark.parametrize(
    ("runs", "at_90", "at_99"),
    [
        ([run(1, 200), run(2, 198), run(4, 180), run(8, 179)], 4, 2),
        ([run(1, 200), run(2, 197), run(4, 179)], 2, 1),
        ([run(2, 197), run(4, 197)], 4, None),
        ([run(2, 179), run(4, 200)], None, None),  # the higher rate was lucky
        ([run(1, 200), run(2, 190), run(4, 200)], 4, 1),
        ([run(4, 198), run(1, 198), run(2, 198)], 4, 4),  # whatever their order
        ([run(1, 200), run(2, 200), run(2, 179)], 1, 1),  # twice the same rate: both count
        ([run(1, 200), run(math.inf, 200)], 1, 1),  # all at once is no rate
        ([run(math.inf, 200)], None, None),
    ],
)
def test_rate_counts_when_it_and_all_lower_ones_keep_the_limits(
    runs: list[Run], at_90: float | None, at_99: float | None
) -> None:
    assert capacities(runs, LIMITS) == [Capacity("", at_90, at_99)]


def test_run_whose_tail_is_longer_than_its_limit_does_not_count() -> None:
    runs = [run(1, 200, 99), run(2, 190, 100), run(4, 190, 100.1)]
    assert capacities(runs, parse_limits("itl_p99:100")) == [Capacity("", 2, 1)]
    assert capacities(runs, LIMITS) == [Capacity("", 4, 1)]
    assert capacities([run(1, 200, None)], parse_limits("itl_p99:100")) == [Capacity("", 1, 1)]  # it has no gaps


def test_run_that_judges_nothing_is_passed_over() -> None:
    cut = Run(1, latency_ms={"itl": {"p99": None}})  # all of its requests were cut off, and none had broken a limit
    assert capacities([cut, run(2, 200), run(4, 190)], LIMITS) == [Capacity("", 4, 2)]
    assert capacities([run(1, 200), replace(cut, rate=2)], LIMITS) == [Capacity("", 1, 1)]
    assert capacities([cut], LIMITS) == [Capacity("", None, None)]


def test_every_setting_has_its_own_capacity_and_without_limits_none_has() -> None:
    runs = [run(rate, num_good, name=name) for name, num_good in (("a", 200), ("b", 100)) for rate in (1, 2.5)]
    found = capacities(runs, LIMITS)
    assert found == [Capacity("a", 2.5, 2.5), Capacity("b", None, None)]
    assert capacity_text(found).splitlines() == [
        "a, highest rate with 90 % good: 2.5 requests/s, with 99 % good: 2.5 requests/s",
        "b, highest rate with 90 % good: none, with 99 % good: none",
    ]
    assert capacity_text([Capacity("", 0.5, None, "times the trace's rate")]) == (
        "highest rate with 90 % good: 0.5 times the trace's rate, with 99 % good: none\n"
    )
    page = ET.fromstring("<main>" + "".join(capacity_parts(found)) + "</main>")
    cells = [cell.text for cell in page.iter("td")]
    assert cells == ["a", "2.5 requests/s", "2.5 requests/s", "b", "none", "none"]
    assert capacities(runs, LatencyLimits()) == capacity_parts([]) == []


@pytest.mark.parametrize(
    ("limit", "at_90", "at_99"), [(99, None, None), (101, 10, 10), (441, 12.5, 10), (481, 12.5, 12.5)]
)
def test_simulated_queue_has_the_capacity_of_its_closed_form(
    limit: int, at_90: float | None, at_99: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty requests at even gaps, each in one step of 100 ms, one at a time. Up to 10/s none waits for another.
    At 12.5/s gaps are 80 ms, so that request i has its token after 100 + 20 i ms: the 18th after 440, the last after
    480. At 20/s the i-th has it after 100 + 50 i: seven within 440 ms, eight within 480.
    """
    trace, steps = tmp_path / "trace.jsonl", tmp_path / "steps.json"
    trace.write_text("\n".join(f'{{"arrival_s": {i}, "prompt_tokens": 9, "output_tokens": 1}}' for i in range(20)))
    costs = {"overhead_ns": 100e6, "prefill_token_ns": 0, "decode_row_ns": 0, "context_token_ns": 0}
    steps.write_text(json.dumps(costs))
    flags = ["--trace", str(trace), "--step-times", str(steps), "--rates", "5,10,12.5,20", "--max-num-seqs", "1"]
    assert cli.main(["simulate", *flags, "--goodput", f"ttft:{limit}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    unit = {"rate_unit": "times the trace's rate"}
    rates = {"rate_90_percent_good": at_90, "rate_99_percent_good": at_99}
    assert document["capacity"] == [{"name": "fcfs"} | rates | unit]
