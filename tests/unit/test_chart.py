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


def test_what_is_no_report_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("[]", encoding="utf-8")
    assert cli.main(["chart", "rate", str(tmp_path / "x")]) == 2
    assert "is not a report of runs" in capsys.readouterr().err
