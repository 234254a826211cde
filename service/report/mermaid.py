"""Runs of a report as one chart in Mermaid's text, which many viewers of Markdown draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from service.errors import ConfigError
from service.report.latency_figures import REQUESTS_PER_S

_NOT_DRAWN: Final = ("mean", "std")  # of a latency's summary: they have no place among its percentiles


@dataclass(frozen=True, slots=True)
class RunValue:
    """What one metric was in one run."""

    name: str  # of the setting that is compared
    rate: float | None  # what was offered, in `rate_unit`; None: all at once
    value: float | Mapping[str, float]
    rate_unit: str = REQUESTS_PER_S

    @property
    def rate_label(self) -> str:
        """The rate as an axis names it."""
        if self.rate is None:
            return "all at once"
        return f"{self.rate:g}/s" if self.rate_unit == REQUESTS_PER_S else f"{self.rate:g} x"

    @property
    def run_label(self) -> str:
        """Names the run among others."""
        return ", ".join(part for part in (self.name, self.rate_label) if part)


def metric_of(run: Mapping[str, object], path: str) -> float | Mapping[str, float | None] | None:
    """The number, or the numbers by name, that `path`, names with dots between, leads to. Raises ConfigError.

    None stands for what was not measured.
    """
    found: object = run
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            names = ", ".join(found) if isinstance(found, Mapping) else "nothing"
            raise ConfigError(f"a run has no {path}: at {name} there is {names}")
        found = found[name]
    if isinstance(found, int | float | None):
        return found
    if not isinstance(found, Mapping) or not all(isinstance(value, int | float | None) for value in found.values()):
        raise ConfigError(f"{path} is neither a number nor numbers by name")
    drawn = {name: value for name, value in found.items() if name not in _NOT_DRAWN}
    if not drawn:
        raise ConfigError(f"a run has no numbers to draw at {path}")
    return drawn


def xy_chart(title: str, y_label: str, values: Sequence[RunValue]) -> str:
    """A line for each setting over the offered rates; of settings that have one rate only, a bar for each.

    A metric of several numbers has their names on the x axis. Mermaid draws no legend: the title names the lines, in
    the order of their colours. Raises ConfigError when there is nothing, or not the same for each setting.
    """
    names = list(dict.fromkeys(value.name for value in values))
    lines = {name: _line([value for value in values if value.name == name]) for name in names}
    columns = [list(line) for line in lines.values()]
    if not columns or any(column != columns[0] for column in columns):
        raise ConfigError("a chart needs runs of the same rates, or names, for every setting")
    if len(columns[0]) == 1 and len(names) > 1:
        return _block(title, y_label, names, [[value for line in lines.values() for value in line.values()]], "bar")
    title = f"{title}: {', '.join(names)}" if len(names) > 1 else title
    return _block(title, y_label, columns[0], [list(line.values()) for line in lines.values()], "line")


def _line(values: Sequence[RunValue]) -> dict[str, float]:
    """The places of one setting's line on the x axis, and its values there."""
    line: dict[str, float] = {}
    for run in values:
        if isinstance(run.value, Mapping):
            end = "" if len(values) == 1 else f" at {run.rate_label}"
            places = {name + end: value for name, value in run.value.items()}
        else:
            places = {run.rate_label: run.value}
        taken = next((place for place in places if place in line), None)
        if taken is not None:
            raise ConfigError(
                f"two runs called {run.name!r} have a value for {taken}: name their files apart, NAME=FILE"
            )
        line |= places
    return line


def _block(title: str, y_label: str, columns: Sequence[str], rows: Sequence[Sequence[float]], kind: str) -> str:
    texts = [f"    title {_quoted(title)}", f"    x-axis [{', '.join(_quoted(column) for column in columns)}]"]
    texts.append(f"    y-axis {_quoted(y_label)} {_range([value for row in rows for value in row])}")
    texts += [f"    {kind} [{', '.join(_plain(value) for value in row)}]" for row in rows]
    return "\n".join(["```mermaid", "xychart-beta", *texts, "```"]) + "\n"


def _range(values: Sequence[float]) -> str:
    """From 0, or the least value where that is below, to the largest; of zeros alone to 1."""
    least, largest = min([0.0, *values]), max([0.0, *values])
    return f"{_plain(least)} --> {_plain(largest if largest > least else 1)}"


def _plain(value: float) -> str:
    """Four digits, and zeros where they are not enough: Mermaid reads no exponent."""
    return f"{Decimal(f'{value:.4g}'):f}"


def _quoted(text: str) -> str:
    return '"' + " ".join(text.replace('"', "'").split()) + '"'
