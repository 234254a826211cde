"""The command line: help, errors on one line, exit codes."""

import io
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from service import cli
from service.api.params import ChatPrompt
from service.commands.generate import AnswerText, RemoteError, chosen_prompt
from service.errors import ConfigError, InvalidRequestError


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException], None]]:
    """Replaces the command `version` by one that raises."""

    def install(error: BaseException) -> None:
        def run(args: object) -> int:
            raise error

        module = ModuleType("service.commands.version")
        module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "service.commands.version", module)

    yield install


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_every_command_reads(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert cli.COMMANDS[command][1:] in " ".join(out.split())


def test_no_command_prints_all_commands_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize(
    "arguments", [["srve"], ["serve"], ["serve", "--model", "m", "--kv-dtype", "srve"], ["generate", "srve"]]
)
def test_bad_arguments_are_one_line_and_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("chairlift") and line.endswith(" --help\n") and line.count("\n") == 1


@pytest.mark.parametrize("arguments", [["health", "--targ", "a:1"], ["bench", "serve", "--targ", "a:1"]])
def test_a_flag_is_not_cut_short(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is the start of one flag today may be the start of two tomorrow."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    command = " ".join(["chairlift", *arguments[:-2]])
    assert f"{command}: unrecognized arguments: --targ a:1; see {command} --help\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("the port\nis taken"), 2, "chairlift version: the port is taken\n"),
        (InvalidRequestError("top_p", 2, "at most 1"), 2, "chairlift version: top_p: 2 is not allowed: at most 1\n"),
        (FileNotFoundError(2, "No such file", "x.jsonl"), 2, "chairlift version: x.jsonl: No such file\n"),
        (OSError(28, "No space left on device"), 2, "chairlift version: No space left on device\n"),
        (MemoryError("no 4 TiB"), 2, "chairlift version: too little memory: no 4 TiB\n"),
        (MemoryError(), 2, "chairlift version: too little memory: none is left\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_expected_error_is_one_line_on_stderr(
    error: BaseException,
    code: int,
    line: str,
    failing_command: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing_command(error)
    assert cli.main(["version"]) == code
    assert capsys.readouterr() == ("", line)


def test_an_interrupt_while_flags_are_read_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: str | None) -> None:
        raise KeyboardInterrupt(command)

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert (130, ("", "interrupted\n")) == (cli.main(["version"]), capsys.readouterr())


def test_unexpected_error_keeps_its_traceback(failing_command: Callable[[BaseException], None]) -> None:
    failing_command(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["version"])


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_serve_on_a_port_in_use_refuses_before_it_loads_the_model(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_cli(
            "serve",
            "--model",
            str(tmp_path),
            "--port",
            str(port),
        )
    assert done.returncode == 2
    assert done.stderr == f"chairlift serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert done.stdout == ""


def test_sigterm_ends_a_server_that_still_loads_also_where_it_is_not_the_default_to_end() -> None:
    script = """import signal
from service import cli
from service.commands import serve
serve.load_model = lambda *_: signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
cli.main(["serve", "--model", "none", "--port", "0"])"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (128 + 15, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "hello"]])
def test_folder_without_manifest_is_one_line_and_2(command: list[str], tmp_path: Path) -> None:
    done = run_cli(*command, "--model", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert (len(done.stderr.splitlines()), done.stdout) == (1, "")


def test_server_that_is_not_there_is_one_line_and_2() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else takes the port
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        done = run_cli("generate", "--target", target, "hello")
        health = run_cli("health", "--target", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"chairlift generate: {target}: UNAVAILABLE")
    assert len(done.stderr.splitlines()) == 1
    assert health.returncode == 1
    assert health.stderr.startswith(f"{target}: UNAVAILABLE: ") and "Connection refused" in health.stderr
    assert len(health.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["health"], ["generate", "hello"], ["bench", "serve"]])
@pytest.mark.parametrize("target", ["foo", "foo:"])
def test_target_without_a_port_is_refused(command: list[str], target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--target", target])
    assert caught.value.code == 2
    assert f"{target}: no port, use HOST:PORT" in capsys.readouterr().err


def test_prompt_that_is_no_text_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A byte that is not UTF-8 arrives in an argument as half a surrogate pair."""
    assert cli.main(["generate", "--target", "127.0.0.1:1", "\udcff"]) == 2
    assert capsys.readouterr().err.startswith("chairlift generate: prompt: ")


def test_system_message_without_a_conversation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--target", "127.0.0.1:1", "--raw", "--system", "Be brief.", "hello"]) == 2
    err = capsys.readouterr().err
    assert err == "chairlift generate: --system cannot be used: --raw continues a plain text\n"


def test_system_message_for_a_model_without_a_template_is_refused() -> None:
    args = Namespace(raw=False, system="Be brief.", prompt="hello")
    with pytest.raises(ConfigError, match="no chat template"):
        chosen_prompt(args, has_template=False)
    assert chosen_prompt(args, has_template=True) == ChatPrompt([("system", "Be brief."), ("user", "hello")])


@pytest.mark.parametrize(("texts", "printed"), [([], ""), (["half"], "half\n"), (["line\n", ""], "line\n")])
def test_error_in_the_middle_of_an_answer_has_a_line_of_its_own(
    texts: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RemoteError), AnswerText() as answer:
        for text in texts:
            answer.show(text)
        raise RemoteError("gone")
    assert capsys.readouterr().out == printed


def test_answer_that_the_terminal_cannot_show_is_written_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with AnswerText() as answer:
        answer.show("naïve")
    assert raw.getvalue() == b"na\\xefve\n"


@pytest.mark.parametrize(("text", "printed"), [("", "\n"), ("whole", "whole\n")])
def test_whole_answer_ends_with_a_newline(text: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with AnswerText() as answer:
        answer.show(text)
    assert capsys.readouterr().out == printed
