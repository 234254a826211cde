"""`chairlift bench step` on a tiny model: the parts make up the step, and cases that do not fit are left out."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from service.bench import step
from service.errors import ConfigError


def parse(model: Path, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    return parser.parse_args(["--model", str(model), "--threads", "2", "--steps", "2", *flags])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_parts_make_up_the_step(
    tiny_export: Callable[[str], Path], capsys: pytest.CaptureFixture[str], kv_dtype: str
) -> None:
    flags = ["--batch", "1,3", "--context", "16,300,40", "--kv-dtype", kv_dtype, "--json"]
    assert step.run(parse(tiny_export("w8a8"), *flags)) == 0
    output = capsys.readouterr()
    costs = json.loads(output.out)
    assert [(cost["batch"], cost["context"]) for cost in costs] == [(1, 16), (1, 40), (3, 16), (3, 40)]
    for cost in costs:
        parts = [cost[f"{name}_ms"] for name in ("gemm", "attention", "sampling", "scheduling", "rest")]
        assert cost["step_ms"] == pytest.approx(sum(parts))
        assert min(cost["gemm_ms"], cost["attention_ms"], cost["sampling_ms"], cost["scheduling_ms"]) > 0
        assert cost["tokens_per_s"] == pytest.approx(cost["batch"] / cost["step_ms"] * 1000)
    assert "batch 1, context 300: left out" in output.err


def test_the_table_has_a_line_per_case(tiny_export: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert step.run(parse(tiny_export("w8a8"), "--batch", "2", "--context", "16,32")) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert (header[:13], len(lines)) == ("batch context", 2)


def test_the_table_marks_a_rate_that_no_memory_has() -> None:
    cost = step.StepCost(2, 64, 4.0, 1.0, 1.0, 1.0, 0.5, 0.5, 500.0, 30e9, 30e9)
    possible, impossible = step.format_table([cost, replace(cost, kv_read_bytes_per_s=31.5e9)]).splitlines()[1:]
    assert possible.endswith("30.0 100% of 30.0")
    assert impossible.endswith("31.5 105% of 30.0 (unreliable: busy machine, or read from caches)")


def test_nothing_left_to_measure_is_an_error(tiny_export: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="no case fits"):
        step.run(parse(tiny_export("w8a8"), "--context", "999"))


def test_context_that_the_steps_would_double_is_left_out(
    tiny_export: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.run(parse(tiny_export("w8a8"), "--batch", "1", "--context", "9,16", "--steps", "16", "--json")) == 0
    output = capsys.readouterr()
    assert [cost["context"] for cost in json.loads(output.out)] == [16]
    assert "batch 1, context 9: left out, shorter than half of its 19 steps" in output.err


def test_more_steps_than_a_profile_holds_are_refused_before_they_run(
    tiny_export: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_MOST_EVENTS", 100)
    with pytest.raises(ConfigError, match=r"--steps 2: at most \d with 2 cases: a profile holds 100 events"):
        step.run(parse(tiny_export("w8a8"), "--batch", "1", "--context", "16,40"))


@pytest.mark.parametrize("value", ["", "1,x", "0", "4,-1"])
def test_a_bad_list_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Path(), f"--batch={value}")
    assert "--batch" in capsys.readouterr().err
