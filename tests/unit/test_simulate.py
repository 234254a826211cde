"""`chairlift simulate`: its document, its page, its complaints."""

import json
import os
from pathlib import Path

import pytest

from service import cli
from tests.unit.pages import captions, parsed_page

SMALL = ["simulate", "--requests", "60", "--prompts", "fixed:20", "--outputs", "fixed:5"]


def test_document_has_a_run_per_rate_and_router(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rates", "5,50", "--replicas", "2", "--router", "round-robin,prefix-affinity", "--json"]
    assert cli.main([*SMALL, *flags]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["name"], run["rate"]) for run in runs] == [
        ("round-robin", 5.0),
        ("round-robin", 50.0),
        ("prefix-affinity", 5.0),
        ("prefix-affinity", 50.0),
    ]
    for run in runs:
        assert run["requests"]["arrived"] == run["requests"]["completed"] == 60
        assert run["throughput"]["output_tokens_per_s"] * run["duration_s"] == pytest.approx(300)
        assert run["throughput"]["total_tokens_per_s"] * run["duration_s"] == pytest.approx(1500)
        assert set(run["latency_ms"]) == {"ttft", "tpot", "itl", "e2el", "queue_wait"}
        assert run["replicas"] == {"mean": 2.0, "max": 2.0}


def test_index_of_tenants_that_never_waited_is_null_and_makes_no_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SMALL, "--tenants", "a,b", "--json"]) == 0
    document = capsys.readouterr().out
    assert json.loads(document)["runs"][0]["fairness"] == {"jain_index": None, "windows": 0}
    path = tmp_path / "runs.json"
    path.write_text(document)
    assert cli.main(["chart", "fairness.jain_index", str(path)]) == 2
    err = capsys.readouterr().err
    assert "fairness.jain_index was not measured in the run fcfs, 10/s" in err and err.count("\n") == 1


def test_host_memory_keeps_what_the_kv_buffer_has_no_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight prefixes of 20 blocks in turns, and 100 blocks for them: each comes back after others took its place."""
    flags = ["--prefixes", "8", "--prefix-tokens", "320", "--prefix-share", "1", "--num-blocks", "101"]
    assert cli.main([*SMALL, *flags, "--host-kv", "off,on", "--host-blocks", "200", "--json"]) == 0
    off, on = json.loads(capsys.readouterr().out)["runs"]
    assert (off["name"], on["name"]) == ("host kv off", "host kv on")
    assert (off["prefix_cache"]["offloaded_blocks"], off["prefix_cache"]["restored_blocks"]) == (0, 0)
    assert on["prefix_cache"]["restored_blocks"] > 200
    assert on["prefix_cache"]["hit_tokens"] > 1.3 * off["prefix_cache"]["hit_tokens"]
    assert on["latency_ms"]["ttft"]["mean"] < off["latency_ms"]["ttft"]["mean"]


@pytest.mark.parametrize(("bound", "num_steps"), [("0", 1), ("20", 1), ("19", 2), ("6", 4)])
def test_prompt_is_computed_in_chunks_of_the_bound(
    bound: str, num_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests far from each other, of 20 prompt tokens each, in steps that take 1 ms whatever they hold."""
    costs = {"overhead_ns": 1e6, "prefill_token_ns": 0, "decode_row_ns": 0, "context_token_ns": 0}
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(costs))
    flags = ["--rates", "0.1", "--step-times", str(path), "--max-chunk-tokens", bound, "--json"]
    assert cli.main([*SMALL, *flags]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["latency_ms"]["ttft"]["median"] == pytest.approx(num_steps, rel=0.02)


def test_page_is_self_contained_and_has_every_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    flags = ["--rates", "5,50", "--tenants", "a:9,b", "--goodput", "ttft:100", "--html", str(path)]
    assert cli.main([*SMALL, *flags]) == 0
    capsys.readouterr()
    assert captions(parsed_page(path.read_text())) == [
        "TTFT p99",
        "TPOT p99",
        "E2EL p99",
        "E2EL median",
        "Effective batch size",
        "KV occupancy",
        "Queue",
        "Replicas",
        "Queue wait",
        "Time to first token",
        "Time per output token",
        "End-to-end latency",
    ]


def test_page_shows_a_command_that_is_no_text_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / os.fsdecode(b"report\xff.html")
    flags = [*SMALL, "--html", str(path)]
    monkeypatch.setattr("sys.argv", ["chairlift", *flags])
    assert cli.main(flags) == 0
    capsys.readouterr()
    assert f"{tmp_path}/report\\udcff.html" in path.read_text(encoding="utf-8")


def test_table_has_units_and_counts_good_requests_only_against_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests far apart: each computes its prompt in a step of 4.48 ms, and then a token in each of four."""
    flags = ["simulate", "--requests", "9", "--rates", "0.1", "--prompts", "fixed:20", "--outputs", "fixed:5"]
    assert cli.main(flags) == 0
    header, units, line = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["setting", "rate", "done", "output", "batch"]
    assert units.split() == ["req/s", "req/s", "tok/s", "rows", *5 * ["ms"]]
    assert header.index("E2EL p99") + len("E2EL p99") == len(units)
    assert (line.split()[5], line.split()[7], line.split()[-1]) == ("4.5", "4.48", "-")
    for limit, share in (("4", "0.0"), ("7", "100.0")):
        assert cli.main([*flags, "--goodput", f"ttft:{limit}"]) == 0
        *lines, capacity = capsys.readouterr().out.splitlines()
        assert [row.split()[-1] for row in lines] == ["good", "%", share]
        rate = "none" if share == "0.0" else "0.1 requests/s"
        assert capacity == f"fcfs, highest rate with 90 % good: {rate}, with 99 % good: {rate}"


def test_table_says_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "9", "--rates", "2", "--prompts", "fixed:20", "--max-model-len", "20"]
    assert cli.main(["simulate", *flags]) == 0
    *_, line, refused = capsys.readouterr().out.splitlines()
    assert line.split()[5:] == ["-"] * 6  # latencies, and Jain's index
    assert refused == "fcfs, 2 requests/s: of 9 requests 9 were refused, 0 failed"


def test_trace_is_replayed_at_several_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(f'{{"arrival_s": {i}, "prompt_tokens": 9, "output_tokens": 2}}' for i in range(20)))
    assert cli.main(["simulate", "--trace", str(trace), "--rates", "1,10", "--json"]) == 0
    slow, fast = json.loads(capsys.readouterr().out)["runs"]
    assert slow["requests"]["completed"] == fast["requests"]["completed"] == 20
    assert (slow["duration_s"], fast["duration_s"]) == (pytest.approx(19, abs=0.1), pytest.approx(1.9, abs=0.1))


def test_trace_is_replayed_whole_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1}\n' * 10_001)
    for flags, arrived in (([], 10_001), (["--requests", "9"], 9)):
        assert cli.main(["simulate", "--trace", str(trace), "--num-blocks", "20000", *flags, "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["requests"]["arrived"] == arrived


def test_autoscaled_deployment_grows_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "2000", "--rates", "100", "--max-num-seqs", "1", "--autoscale", "1:4:8", "--json"]
    flags += ["--scale-interval-s", "1", "--startup-s", "2"]
    assert cli.main([*SMALL, *flags]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["replicas"]["max"] > 1
    assert run["requests"]["completed"] == 2000


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--router", "random"], "router 'random'"),
        (["--prompts", "fixed:0"], "lengths 'fixed:0'"),
        (["--autoscale", "3"], "--autoscale '3'"),
        (["--autoscale", "1:1025:8"], "most <= 1,024"),
        (["--autoscale", "1:8:64", "--replicas", "9"], "num_replicas is 9 at the start, but the most"),
        (["--autoscale", "1:8:1e-320"], "must be finite, and at least 1e-06"),
        (["--host-kv", "off,on", "--prefix-cache", "off"], "--host-kv on: needs --prefix-cache on"),
        (["--host-kv", "on", "--batching", "continuous,static"], "needs --prefix-cache on and --batching continuous"),
        (["--rates", "1e-6", "--outputs", "fixed:1"], "all must arrive within 1e+09 s"),
        (["--step-times", "nowhere"], "nowhere: no such file"),
        (["--html", "nowhere/at/all.html"], "its folder does not exist"),
        (["--html", "/"], "/: is a folder"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_wrong_setting_is_one_line_and_2(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *flags]) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1


def test_columns_that_no_memory_holds_are_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["simulate", "--max-num-seqs", "65536", "--max-num-batched-tokens", "65536", "--max-model-len", "16777216"]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert "too little memory: Unable to allocate 4.00 TiB" in err and err.count("\n") == 1


def test_seed_below_zero_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["simulate", "--seed", "-1"])
    err = capsys.readouterr().err
    assert "argument --seed: '-1'" in err and err.count("\n") == 1
