"""`chairlift bench offline` on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.commands.bench_offline import offline_run
from service.commands.run import Tally
from tests.unit.test_cli import run_cli


def test_figures_of_a_pass() -> None:
    tally = Tally(0.0, num_requests=10, num_errors=2, prompt_tokens=300, cached_prompt_tokens=60, completion_tokens=100)
    measured = offline_run(tally, 4.0)
    assert (measured.requests_per_s, measured.output_tokens_per_s, measured.total_tokens_per_s) == (2.0, 25.0, 100.0)


def test_each_pass_answers_the_whole_file(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": [1, 2, 3 + i], "max_tokens": 4, "ignore_eos": True} for i in range(5)]
    requests.write_text("\n".join([*map(json.dumps, lines), "nonsense"]))
    flags = ["--model", str(tiny_export("w8a8")), "--requests", str(requests), "--runs", "2", "--kv-memory", "16MiB"]
    done = run_cli("bench", "offline", *flags, "--json")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert len(runs) == 2
    for run in runs:
        assert (run["requests"], run["errors"], run["prompt_tokens"], run["output_tokens"]) == (6, 1, 15, 20)
        assert run["output_tokens_per_s"] == pytest.approx(20 / run["elapsed_s"])


@pytest.mark.parametrize(
    ("flags", "num_cached_tokens"),
    [
        ([], 3 * 16),
        (["--prefix-cache", "off"], 0),
        (["--batching", "static"], 0),
    ],
)
def test_prompts_of_an_earlier_pass_are_cached_unless_the_settings_forbid_it(
    flags: list[str], num_cached_tokens: int, tiny_export: Callable[[str], Path], tmp_path: Path
) -> None:
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": [i + 1] * 20, "max_tokens": 4, "ignore_eos": True} for i in range(3)]
    requests.write_text("\n".join(map(json.dumps, lines)))
    flags = [*flags, "--model", str(tiny_export("w8a8")), "--requests", str(requests), "--kv-memory", "16MiB"]
    done = run_cli("bench", "offline", *flags, "--runs", "2", "--order", "file", "--max-concurrency", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert [run["cached_prompt_tokens"] for run in json.loads(done.stdout)["runs"]] == [0, num_cached_tokens]
