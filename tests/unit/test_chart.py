"""Charts of reports in Mermaid's text."""

import json
from pathlib import Path

import pytest

from service import cli
from service.errors import ConfigError
from service.report.mermaid import RunValue, metric_of, xy_chart

RUN = {"name": "", "rate": 2.0, "latency_ms": {"itl": {"mean": 3.0, "median": 2.0, "std": 1.0, "p99": 9.0}}}


def report(path: Path, *runs: dict[str, object]) -> str:
    path.write_text(json.dumps({"command": "", "runs": runs}), encoding="utf-8")
    return str(path)


def test_settings_are_lines_over_the_offered_rates() -> None:
    values = [RunValue("a", 1.0, 10.0), RunValue("b", 1.0, 20.5), RunValue("a", 4.0, 30.0), RunValue("b", 4.0, 40.0)]
    assert xy_chart("Load", "tokens/s", values).splitlines() == [
        "```mermaid",
        "xychart-beta",
        '    title "Load: a, b"',
        '    x-axis ["1/s", "4/s"]',
        '    y-axis "tokens/s" 0 --> 40',
        "    line [10, 30]",
        "    line [20.5, 40]",
        "```",
    ]


def test_speeds_of_a_trace_are_no_rates_a_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [{"name": "", "rate": rate, "rate_unit": "times the trace's rate", "value": rate} for rate in (0.5, 1.0)]
    assert cli.main(["chart", "value", report(tmp_path / "trace", *runs)]) == 0
    assert '    x-axis ["0.5 x", "1 x"]\n' in capsys.readouterr().out


def test_settings_with_one_rate_are_bars() -> None:
    chart = xy_chart("Load", "tokens/s", [RunValue("a", None, 10.0), RunValue("b", None, 20.0)])
    assert '    title "Load"\n    x-axis ["a", "b"]\n' in chart
    assert "    bar [10, 20]\n" in chart


def test_several_numbers_have_their_names_on_the_axis() -> None:
    values = [RunValue(name, 1.0, {"p50": x, "p99": 2 * x}) for name, x in (("a", 1.0), ("b", 3.0))]
    chart = xy_chart("ITL", "ms", values)
    assert '    x-axis ["p50", "p99"]\n' in chart
    assert "    line [1, 2]\n    line [3, 6]\n" in chart


@pytest.mark.parametrize("values", [[], [RunValue("a", 1.0, 1.0), RunValue("b", 2.0, 1.0)]])
def test_lines_need_the_same_places(values: list[RunValue]) -> None:
    with pytest.raises(ConfigError, match="same rates"):
        xy_chart("", "", values)


@pytest.mark.parametrize(
    "values",
    [
        [RunValue("a", 1.0, 1.0), RunValue("a", 1.0, 2.0)],
        [RunValue("", None, 1.0), RunValue("", None, 2.0)],
        [RunValue("a", 1000000.1, 1.0), RunValue("a", 1000000.2, 2.0)],  # both read 1e+06
        [RunValue("a", 1.0, {"p50": 1.0}), RunValue("a", 1.0, {"p50": 2.0})],
    ],
)
def test_no_run_hides_another(values: list[RunValue]) -> None:
    with pytest.raises(ConfigError, match="NAME=FILE"):
        xy_chart("", "", values)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.0, 0.0), "0 --> 1"),
        ((-2.0, 3.0), "-2 --> 3"),
        ((-2.0, -1.0), "-2 --> 0"),
        ((12344.0, 2e6), "0 --> 2000000"),  # Mermaid reads no exponent
        ((1e-7, 2e-7), "0 --> 0.0000002"),
    ],
)
def test_range_holds_every_value(numbers: tuple[float, float], expected: str) -> None:
    chart = xy_chart("", "y", [RunValue("a", float(rate), value) for rate, value in enumerate(numbers)])
    assert f'    y-axis "y" {expected}\n' in chart and "e+" not in chart and "e-0" not in chart


def test_texts_cannot_end_their_quotes_or_line() -> None:
    values = [RunValue(name, None, 1.0) for name in ('a"b', "c\nd")]
    lines = xy_chart('T"\nx', 'u"\nv', values).splitlines()
    assert lines[2:5] == ['    title "T\' x"', '    x-axis ["a\'b", "c d"]', '    y-axis "u\' v" 0 --> 1']
    values = [RunValue(name, rate, 1.0) for name in ('a"b', "c\nd") for rate in (1.0, 2.0)]
    assert xy_chart("T", "u", values).splitlines()[2] == '    title "T: a\'b, c d"'


@pytest.mark.parametrize("numbers", [{}, {"mean": 1.0, "std": 0.0}])
def test_a_group_without_numbers_is_told(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="no numbers to draw at tenant_tokens"):
        metric_of({"tenant_tokens": numbers}, "tenant_tokens")


def test_a_metric_is_found_by_its_path_or_says_what_there_is() -> None:
    assert metric_of(RUN, "latency_ms.itl.p99") == 9.0
    assert metric_of(RUN, "latency_ms.itl") == {"median": 2.0, "p99": 9.0}
    with pytest.raises(ConfigError, match="there is itl"):
        metric_of(RUN, "latency_ms.ttft")
    with pytest.raises(ConfigError, match="neither"):
        metric_of(RUN, "name")


def test_files_get_names_and_values_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"{name}={report(tmp_path / name, RUN)}" for name in ("static", "continuous")]
    assert cli.main(["chart", "latency_ms.itl.p99", *files, "--unit", "s", "--divide", "1000"]) == 0
    out = capsys.readouterr().out
    assert '    x-axis ["static", "continuous"]\n    y-axis "s" 0 --> 0.009\n    bar [0.009, 0.009]\n' in out


def test_a_file_whose_path_has_an_equals_sign_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = report(tmp_path / "seqs=8", RUN)
    assert cli.main(["chart", "latency_ms.itl.p99", file, f"x=y={file}"]) == 0
    assert '    x-axis ["", "x=y"]\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", 'it has no list "runs"'),
        ("[" * 100_000, ""),
        ('{"a": 1}', 'it has no list "runs"'),
        ('{"runs": 3}', 'it has no list "runs"'),
        ('{"runs": [{"name": ""}]}', "one of them lacks its name or its rate"),
        ('{"runs": [{"name": "", "rate": "x"}]}', "its rate is 'x'"),
        ('{"runs": [{"name": "", "rate": NaN}]}', "its rate is nan"),
        ('{"runs": [{"name": "", "rate": 1' + "0" * 400 + "}]}", ""),
    ],
)
def test_what_is_no_report_is_told_in_one_line(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text(text, encoding="utf-8")
    assert cli.main(["chart", "rate", str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert f"is not a report of runs: {reason}" in err and err.count("\n") == 1


@pytest.mark.parametrize(("metric", "named"), [("ttft.p99", "ttft.p99"), ("ttft", "ttft.median")])
@pytest.mark.parametrize(("rate", "label"), [(4.0, "4/s"), (None, "all at once")])
def test_what_a_run_has_not_measured_is_told_in_one_line(
    metric: str, named: str, rate: float | None, label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = {"name": "fcfs", "rate": rate, "latency_ms": {"ttft": {"mean": None, "median": None, "p99": None}}}
    assert cli.main(["chart", f"latency_ms.{metric}", f"load={report(tmp_path / 'x', empty)}"]) == 2
    complaint = f"chairlift chart: latency_ms.{named} was not measured in the run load, fcfs, {label}\n"
    assert capsys.readouterr().err == complaint


@pytest.mark.parametrize(
    ("value", "divisor", "complaint"),
    [
        ("1e300", "1e-300", "value is 1e+300: divided by 1e-300 it is not finite"),
        ("Infinity", "1", "value is inf"),
        ("NaN", "1", "value is nan"),
        ("1", "inf", "--divide is inf"),
        ("1", "0", "--divide is 0.0"),
    ],
)
def test_what_is_not_finite_is_refused(
    value: str, divisor: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text('{"runs": [{"name": "", "rate": 1, "value": ' + value + "}]}", encoding="utf-8")
    assert cli.main(["chart", "value", str(tmp_path / "x"), "--divide", divisor]) == 2
    assert complaint in capsys.readouterr().err
