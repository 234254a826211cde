"""`chairlift generate` on a tiny model folder."""

from collections.abc import Callable
from pathlib import Path

from tests.unit.test_cli import run_cli


def test_answer_that_was_cut_says_so_on_stderr(tiny_export: Callable[[str], Path]) -> None:
    flags = ["--model", str(tiny_export("w8a8")), "--kv-memory", "16MiB", "--raw", "--ignore-eos"]
    done = run_cli("generate", *flags, "--max-tokens", "3", "a b")
    assert done.returncode == 0
    assert done.stderr == "chairlift generate: the answer was cut after 3 tokens: --max-tokens\n"
