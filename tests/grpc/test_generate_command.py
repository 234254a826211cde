"""`chairlift generate` against a toy server."""

import asyncio

import pytest

from service import cli
from service.obs.logging import configure_logging
from tests.doubles import LIMITS, connected_toy, run_async, toy_output, toy_text

PROMPT_IDS = (1, 2, 3)


def generate(*flags: str) -> None:
    configure_logging("error")  # the toy server writes its lines to the same streams

    async def main() -> None:
        async with connected_toy() as toy:
            command = ["generate", "--target", f"127.0.0.1:{toy.port}", "--raw", "--temperature", "0", *flags]
            assert await asyncio.to_thread(cli.main, [*command, toy_text(PROMPT_IDS)]) == 0

    run_async(main())


@pytest.mark.parametrize(
    ("flags", "num_tokens", "reason"),
    [
        (["--max-tokens", "4"], 4, "--max-tokens"),
        ([], LIMITS.max_model_len - len(PROMPT_IDS), "the context is full"),
    ],
)
def test_answer_that_was_cut_says_so_on_stderr(
    flags: list[str], num_tokens: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(*flags)
    out, err = capsys.readouterr()
    assert toy_text(toy_output(PROMPT_IDS, num_tokens)) == out.strip()
    assert err == f"chairlift generate: the answer was cut after {num_tokens} tokens: {reason}\n"


def test_answer_that_the_model_ended_says_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *_ = toy_output(PROMPT_IDS, 2)
    generate("--max-tokens", "4", "--stop", f"w{second}")
    assert capsys.readouterr() == (f"w{first} \n", "")
