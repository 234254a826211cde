"""`chairlift bench offline` on a tiny model."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.commands.bench_offline import offline_run
from service.commands.run import Tally
from tests.unit.test_cli import run_cli


def test_figures_of_a_pass() -> None:
    tally = Tally(0.0, num_requests=10, num_errors=2, prompt_tokens=300, cached_prompt_tokens=60, completion_tokens=100)
    measured = offline_run(tally, 4.0)
    assert (2.0, 25.0, 100.0) == (measured.requests_per_s, measured.output_tokens_per_s, measured.total_tokens_per_s)


def test_each_pass_answers_the_whole_file(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": [1, 2, 3 + i], "max_tokens": 4, "ignore_eos": True} for i in range(5)]
    requests.write_text("\n".join([*map(json.dumps, lines), "nonsense"]))
    flags = ["--model", str(tiny_export("w8a8")), "--requests", str(requests), "--runs", "2", "--kv-memory", "16MiB"]
    done = run_cli("bench", "offline", *flags, "--json")
    assert 0 == done.returncode, done.stderr
    assert "bad requests: 1; the first one: line 6 is not JSON" in done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert 2 == len(runs)
    for run in runs:
        assert (6, 1, 15, 20) == (run["requests"], run["errors"], run["prompt_tokens"], run["output_tokens"])
        assert pytest.approx(20 / run["elapsed_s"]) == run["output_tokens_per_s"]


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
    assert 0 == done.returncode, done.stderr
    assert [0, num_cached_tokens] == [run["cached_prompt_tokens"] for run in json.loads(done.stdout)["runs"]]


def test_two_engines_take_turns(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": [i + 1] * 20, "max_tokens": 4, "ignore_eos": True} for i in range(3)]
    requests.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--model", str(tiny_export("w8a8")), "--requests", str(requests), "--kv-memory", "16MiB"]
    flags += ["--runs", "2", "--warm-ups", "1", "--against", "prefix-cache=off", "max_num_seqs=2"]
    done = run_cli("bench", "offline", *flags, "--json")
    assert 0 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert [3 * 16] * 2 == [run["cached_prompt_tokens"] for run in report["runs"]]  # what the warm-up left
    assert [0] * 2 == [run["cached_prompt_tokens"] for run in report["against"]["runs"]]
    assert {"prefix_cache": "off", "max_num_seqs": "2"} == report["against"]["settings"]
    pairs = zip(report["runs"], report["against"]["runs"], strict=True)
    ratios = [run["output_tokens_per_s"] / other["output_tokens_per_s"] for run, other in pairs]
    median = pytest.approx(sum(ratios) / 2)
    assert {"num_pairs": 2, "median": median, "low": None, "high": None} == report["output_tokens_per_s_ratio"]
    done = run_cli("bench", "offline", *flags)
    starts = [line.partition(":")[0].partition(",")[0] for line in done.stdout.splitlines()]
    # The warm-up's pair began with the first engine, so that the first pair that counts begins with the second.
    assert ["against", "3 requests", "3 requests", "against", "output tokens/s in the median"] == starts


def test_cold_passes_find_nothing_of_earlier_ones(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": [7] * 20, "max_tokens": 4, "tenant": tenant} for tenant in ("a", "b", "b" * 64)]
    requests.write_text("\n".join(map(json.dumps, [*lines, lines[0]])))
    flags = ["--model", str(tiny_export("w8a8")), "--requests", str(requests), "--kv-memory", "16MiB", "--cold"]
    done = run_cli("bench", "offline", *flags, "--runs", "2", "--order", "file", "--max-concurrency", "1", "--json")
    assert 0 == done.returncode, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(0, 16)] * 2 == [(run["errors"], run["cached_prompt_tokens"]) for run in runs]  # the first line, again


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("batching", "--against: 'batching' is no NAME=VALUE, as prefix_cache=off"),
        ("block_size=3", "--against: block_size: 3 is not a power of two"),  # known when the first engine is loaded
    ],
)
def test_a_second_engine_that_cannot_be_is_one_line(
    setting: str, error: str, tiny_export: Callable[[str], Path], tmp_path: Path
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt_token_ids": [1]}')
    given = ["--model", str(tiny_export("w8a8")), "--requests", str(requests), "--kv-memory", "16MiB"]
    done = run_cli("bench", "offline", *given, "--against", setting)
    assert (2, "", f"chairlift bench offline: {error}\n") == (done.returncode, done.stdout, done.stderr)


def test_an_interrupted_comparison_tells_what_it_has(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}))
    flags = ["--model", str(tiny_export("w8a8")), "--requests", str(requests), "--kv-memory", "16MiB"]
    command = [sys.executable, "-m", "service.cli", "bench", "offline", *flags, "--runs", "3000"]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may have had it ignored
    try:
        process = subprocess.Popen(
            [*command, "--against", "prefix_cache=off"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    with process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        *_, last = process.stdout
        assert (130, "interrupted\n") == (process.wait(timeout=60), process.stderr.read())
    assert last.startswith("output tokens/s in the median: ")
