"""What a long job says of itself."""

import io

import pytest

from graphs.progress import ProgressBar

CLEARED = "\r\033[K"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_line_per_stage() -> None:
    terminal = _Terminal()
    bar = ProgressBar(terminal)
    for stage, num_parts in (("reading", 2), ("writing", 3)):
        for num_done in range(num_parts + 1):
            bar(stage, num_done, num_parts)
    lines = terminal.getvalue().split("\n")
    assert [line.rsplit(CLEARED, 1)[-1].split()[0::2] for line in lines[:-1]] == [
        ["reading", "2/2"],
        ["writing", "3/3"],
    ]
    assert lines[-1] == ""


def test_open_stage_is_complete_when_it_ends_and_not_before() -> None:
    terminal = _Terminal()
    with ProgressBar(terminal).open("sending", 2) as progress:
        progress(1, ", 1 in flight")
        progress(2)
        assert "\n" not in terminal.getvalue()
    shown = [(text.split(" ")[0], text.split()[-1]) for text in terminal.getvalue().split(CLEARED)[1:]]
    assert shown == [("sending,", "1/2"), ("sending", "1/2"), ("sending", "2/2")]
    assert terminal.getvalue().endswith("2/2\n")


def test_stage_that_fails_is_never_complete() -> None:
    terminal = _Terminal()
    with pytest.raises(ValueError, match="no"), ProgressBar(terminal).open("sending", 2) as progress:
        progress(2)
        raise ValueError("no")
    assert "2/2" not in terminal.getvalue()


def test_file_gets_a_line_every_ten_seconds() -> None:
    file, now_s = io.StringIO(), 0.0
    bar = ProgressBar(file, lambda: now_s)
    for second in range(31):
        now_s = second
        bar("calibrating", second, 60)
    assert [line.split()[-1] for line in file.getvalue().splitlines()] == ["10/60", "20/60", "30/60"]


def test_short_job_says_nothing_to_a_file() -> None:
    file, now_s = io.StringIO(), 0.0
    bar = ProgressBar(file, lambda: now_s)
    now_s = 9.9
    bar("verifying", 0, 1)
    bar("verifying", 1, 1)
    assert file.getvalue() == ""
