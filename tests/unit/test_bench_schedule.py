"""`chairlift bench schedule`: steady state, and the document it prints."""

import argparse
import json

import pytest

from service.bench import schedule


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    schedule.add_arguments(parser)
    return parser.parse_args(list(flags))


def test_document_has_a_row_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule.run(parse("--running", "8,32", "--steps", "40", "--json")) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["running"] for row in rows] == [8, 32]
    for row in rows:
        assert 0 < row["plan_commit_us_p50"] <= row["plan_commit_us_p99"]


@pytest.mark.parametrize("has_cache", [True, False])
def test_batch_stays_full_while_sequences_come_and_go(has_cache: bool) -> None:
    """With outputs of 20 tokens on average, a twentieth of the rows ends in a step, and as many are admitted."""
    cost = schedule.measure(64, 400, (8, 20), has_cache=has_cache)
    assert cost.rows_per_step == pytest.approx(64, rel=0.02)
    assert cost.finished_per_step == pytest.approx(64 / 20, rel=0.1)
    assert cost.admitted_per_step == pytest.approx(cost.finished_per_step, abs=0.2)
    assert cost.prompt_tokens_per_step == pytest.approx(8 * cost.admitted_per_step, rel=0.1)


def test_table_has_a_line_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule.run(parse("--running", "4", "--steps", "3")) == 0
    header, units, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["running", "plan+commit", "p50"]
    assert units.split() == ["us"] * 5
    assert len(lines) == 1
