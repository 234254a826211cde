"""`chairlift run` on a tiny model folder."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def run_piped(model: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Five requests through a pipe."""
    lines = [{"id": i, "prompt_token_ids": [1, 2, 3 + i], "max_tokens": 4, "ignore_eos": True} for i in range(5)]
    flags = ["--model", str(model), "--kv-memory", "16MiB", "--requests", "/dev/stdin", "--output", str(output)]
    command = [sys.executable, "-m", "service.cli", "run", *flags]
    text = "\n".join(map(json.dumps, lines))
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_requests_may_come_through_a_pipe(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    done = run_piped(tiny_export("w8a8"), tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr[:10]) == (0, "5 requests"), done.stderr
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {result["id"]: len(result["token_ids"]) for result in results} == dict.fromkeys(range(5), 4)


def test_full_disk_is_one_line_that_names_the_file(tiny_export: Callable[[str], Path]) -> None:
    done = run_piped(tiny_export("w8a8"), Path("/dev/full"))
    assert (done.returncode, done.stderr) == (2, "chairlift run: /dev/full: No space left on device\n")


def test_results_may_go_where_stdout_goes(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    """Behind what is there, and before what comes after."""
    requests, output = tmp_path / "in.jsonl", tmp_path / "all.txt"
    requests.write_text('{"id": 7, "prompt_token_ids": [1], "max_tokens": 1}\n')
    output.write_text("before\n")
    flags = ["--model", str(tiny_export("w8a8")), "--kv-memory", "16MiB", "--requests", str(requests)]
    with output.open("a") as stdout:
        command = [sys.executable, "-m", "service.cli", "run", *flags, "--output", "/dev/stdout"]
        assert subprocess.run(command, stdout=stdout, timeout=60, check=False).returncode == 0
        subprocess.run(["echo", "after"], stdout=stdout, check=True)
    first, result, last = output.read_text().splitlines()
    assert (first, json.loads(result)["id"], last) == ("before", 7, "after")


def waits_for_pipe(pid: int) -> bool:
    """Whether the kernel says that the process's main thread sleeps in a read of a pipe."""
    return "pipe_read" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="where a process sleeps is not told")
def test_an_interrupt_ends_the_wait_for_a_pipe(tiny_export: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    flags = ["--model", str(tiny_export("w8a8")), "--kv-memory", "16MiB", "--requests", "/dev/stdin"]
    command = [sys.executable, "-m", "service.cli", "run", *flags, "--output", str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not output.exists():
            assert process.poll() is None
        if not any(waits_for_pipe(process.pid) for _ in range(1_000_000)):
            process.kill()
            pytest.skip("where a process sleeps is not told")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"
