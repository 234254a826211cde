"""Charts and pages: right places, round numbers, escaped text, nothing fetched."""

from xml.etree import ElementTree as ET

import pytest

from service.errors import ConfigError
from service.report.chart import Axis, Line, line_chart, short_number
from service.report.latency_figures import pareto_figures, quantile_figure
from service.report.latency_limits import LatencyLimits, parse_limits
from service.report.page import figure, html_page, latency_table, preformatted, table
from tests.unit.measured_run import Run
from tests.unit.pages import captions, parsed_page


def test_chart_places_points_between_its_axes() -> None:
    """The plot is 550 wide from 70 on and 228 high above 248; its y axis ends 5 % above the largest value."""
    svg = ET.fromstring(line_chart([Line([(0, 0), (5, 100), (10, 105)], "a")], "x", "y"))
    (polyline,) = svg.iter("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in str(polyline.get("points")).split()]
    assert places[0] == (70, 248)
    assert places[1] == (345, pytest.approx(248 - 228 * 100 / 110.25, abs=0.1))
    assert places[2] == (620, pytest.approx(248 - 228 / 1.05, abs=0.1))


def test_logarithmic_chart_leaves_out_what_is_not_positive() -> None:
    svg = ET.fromstring(line_chart([Line([(0, 0), (1, 10), (2, 1000)], "a")], "x", "y", has_log_y=True))
    assert len(list(svg.iter("circle"))) == 2


def test_every_named_line_is_in_the_legend() -> None:
    svg = ET.fromstring(line_chart([Line([(0, 1)], "a<b"), Line([(1, 2)]), Line([(2, 3)], "c")], "x", "y"))
    texts = [element.text for element in svg.iter("text")]
    assert "a<b" in texts and "c" in texts


def test_chart_of_nothing_says_so() -> None:
    assert "Nothing was measured" in line_chart([Line([])], "x", "y")


def test_throughput_against_latency_joins_the_rates_in_their_order() -> None:
    """Throughputs 10, 20 and 40 at rates 1, 2 and 4: in whatever order they were run, the line never turns back.
    At rate 8 no request was completed.
    """
    summary = dict.fromkeys(("median", "p99"), 1.0)
    runs = [
        Run(
            rate,
            throughput={"output_tokens_per_s": 10.0 * rate},
            latency_ms=dict.fromkeys(("ttft", "tpot", "e2el"), summary),
        )
        for rate in (4, 1, 2)
    ]
    runs.append(
        Run(
            8,
            throughput={"output_tokens_per_s": 0.0},
            latency_ms={key: dict.fromkeys(summary) for key in runs[0].latency_ms},
        )
    )
    for polyline in ET.fromstring(pareto_figures(runs)).iter("polyline"):
        places = [float(pair.split(",")[0]) for pair in str(polyline.get("points")).split()]
        assert places == sorted(places) and len(places) == 3


@pytest.mark.parametrize(("key", "unit"), [("ttft", "percent of requests"), ("itl", "percent of gaps")])
def test_distribution_names_what_its_percents_are_of(key: str, unit: str) -> None:
    drawn = ET.fromstring(quantile_figure([Run(1, quantiles_ms={key: [(50.0, 3.0)]})], key, "", ""))
    assert unit in [element.text for element in drawn.iter("text")]


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0, 10.5, is_log=False), [0, 5, 10]),
        (Axis(0, 0.42, is_log=False), pytest.approx([0, 0.1, 0.2, 0.3, 0.4])),
        (Axis(0.9, 60, is_log=True), pytest.approx([1, 2, 5, 10, 20, 50])),
        (Axis(5, 10, is_log=True), pytest.approx([5, 10])),
        (Axis(3, 6, is_log=True), pytest.approx([3, 4, 5, 6])),
        (Axis(6.1, 8, is_log=True), pytest.approx([6.5, 7, 7.5, 8])),
        (Axis(2.1, 4.9, is_log=True), pytest.approx([3, 4])),
        (Axis(1, 1000, is_log=True), pytest.approx([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])),
        (Axis(1e-6, 20, is_log=True), pytest.approx([10.0**power for power in range(-6, 2)])),
    ],
)
def test_ticks_are_round_numbers(axis: Axis, ticks: object) -> None:
    assert axis.ticks() == ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (12.345, "12.3"),
        (1234, "1,234"),
        (999.6, "1,000"),
        (999.4, "999"),
        (12_345, "12.35k"),
        (5.6e6, "5.6M"),
        (-2, "-2"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


def test_page_is_well_formed_and_escapes_what_it_is_given() -> None:
    parts = [
        preformatted("run --x '<b>' & more"),
        figure("Caption <i>", line_chart([Line([(0, 1), (1, 2)], "n & m")], "<x>", '"y"'), "note"),
        table(["name", "value"], [["<td>", 1.5]]),
        latency_table({"ttft": {"mean": 1, "median": 2, "std": 3, "p90": 4, "p95": 5, "p99": 6, "max": 7}}),
    ]
    root = parsed_page(html_page("A & B", parts))
    assert captions(root) == ["Caption <i>"]
    assert [element.text for element in root.iter("pre")] == ["run --x '<b>' & more"]
    cells = [element.text for element in root.iter("td")]
    assert cells == ["<td>", "1.5", "ttft", "1", "2", "3", "4", "5", "6"]


def test_limits_are_inclusive_and_all_must_be_met() -> None:
    limits = parse_limits("ttft:500,tpot:50")
    assert limits == LatencyLimits(ttft_ms=500, tpot_ms=50)
    assert limits.are_met(500, 50, 1e9)
    assert not limits.are_met(500.1, 50, 0)
    assert not limits.are_met(0, 50.1, 0)
    assert LatencyLimits().are_met(1e9, 1e9, 1e9) and not LatencyLimits().are_set


def test_limit_of_a_runs_tail_is_inclusive_and_concerns_no_request() -> None:
    limits = parse_limits("itl_p99:100")
    assert limits == LatencyLimits(itl_p99_ms=100) and limits.are_set
    assert limits.are_met(1e9, 1e9, 1e9)
    assert limits.are_met_by_run(100) and not limits.are_met_by_run(100.1)
    assert LatencyLimits(ttft_ms=1).are_met_by_run(1e9)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:0", "ttft:x", "itl:5", "itl_p99", "itl_p99:0", "ttft:1,,", "ttft:inf", "ttft:1,ttft:2"]
)
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="limit"):
        parse_limits(text)
