"""Numbers on the command line: what is out of range is one line that names flag, value and limit."""

from argparse import ArgumentTypeError

import pytest

from service import cli
from service.bench import schedule, step
from service.bench.number_flags import ARRIVAL_FLAGS, finite_rates, listed, rates, real_number, whole_number
from service.commands import bench_serve, simulate

COMMANDS = {
    "simulate": (
        *simulate.WORKLOAD_FLAGS,
        *simulate.DEPLOYMENT_FLAGS,
        *simulate.AUTOSCALE_FLAGS,
        *ARRIVAL_FLAGS,
    ),
    "bench step": step.NUMBER_FLAGS,
    "bench schedule": schedule.NUMBER_FLAGS,
    "bench serve": (*bench_serve.NUMBER_FLAGS, *ARRIVAL_FLAGS),
}
FLAGS = [(command, flag.name) for command, flags in COMMANDS.items() for flag in flags]
FLAGS += [
    ("simulate", "--rates"),
    ("bench serve", "--rates"),
    ("bench offline", "--runs"),
    ("bench offline", "--warm-ups"),
    ("health", "--wait"),
]


@pytest.mark.parametrize("value", ["nan", "-1", "", "x"])
@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_number_out_of_range_is_one_line_that_names_flag_value_and_limit(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), f"{flag}={value}"])
    err = capsys.readouterr().err
    assert err.startswith(f"chairlift {command}: argument {flag}: '") and err.count("\n") == 1
    assert value in err and " number from " in err


@pytest.mark.parametrize("number", ["nan", "inf", "1e305", "9223372036854775808"])
@pytest.mark.parametrize(
    ("command", "flag"), [pair for pair in FLAGS if pair[1] not in {"--seed", "--rates", "--burstiness"}]
)
def test_number_beyond_what_fits_is_refused(
    command: str, flag: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), f"{flag}={number}"])
    assert f"argument {flag}: {number!r} is no " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag"), [("bench step", "--steps"), ("bench schedule", "--steps"), ("bench offline", "--runs")]
)
def test_nothing_to_measure_is_refused(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), flag, "0"])
    assert f"argument {flag}: '0' is no whole number from 1 to " in capsys.readouterr().err


def test_whole_number_is_read_at_its_limits_and_refused_beyond() -> None:
    read = whole_number(2, 3000)
    assert [2, 3000] == [read("2"), read("3000")]
    for text in ("1", "3001", "2.0", "nan", "", "9" * 5000):
        with pytest.raises(ArgumentTypeError, match="whole number from 2 to 3,000"):
            read(text)


def test_real_number_is_read_at_its_limits_and_refused_beyond() -> None:
    read = real_number(0, 1)
    assert [0.0, 1.0, 0.25] == [read("0"), read("1"), read("2.5e-1")]
    for text in ("-0.001", "1.001", "nan", "inf", "", "one"):
        with pytest.raises(ArgumentTypeError, match="number from 0 to 1"):
            read(text)


def test_list_holds_what_its_parts_hold() -> None:
    assert [1, 4, 16] == listed(whole_number(1, 16))("1,4,16")
    with pytest.raises(ArgumentTypeError, match="'17'"):
        listed(whole_number(1, 16))("1,17")


def test_rates_may_be_infinite_and_not_so_low_that_no_request_comes() -> None:
    assert [1e-6, 2.5, float("inf")] == rates("1e-6,2.5,inf")
    with pytest.raises(ArgumentTypeError, match="'9e-7' is no number from 1e-06 to inf"):
        rates("9e-7")
    assert [1e-6, 1e9] == finite_rates("1e-6,1e9")
    for text in ("inf", "1e300", "1,1.1e9", "9e-7"):
        with pytest.raises(ArgumentTypeError, match=r"is no number from 1e-06 to 1e\+09"):
            finite_rates(text)


def test_a_simulation_has_no_rate_beyond_its_clock(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("inf", "1e300"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["simulate", "--rates", text])
        assert f"--rates: '{text}' is no number from 1e-06 to 1e+09" in capsys.readouterr().err
