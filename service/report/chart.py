"""Line charts as inline SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 640
_HEIGHT: Final = 300
_LEFT: Final = 70
_RIGHT: Final = 20
_TOP: Final = 20
_BOTTOM: Final = 52
_LINE_HEIGHT: Final = 18
# Distinguishable with the common colour blindnesses: Okabe and Ito's palette, less its yellow.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MAX_MARKED_POINTS: Final = 40  # lines with more are drawn without dots
_MAX_DECADES_WITH_DIGITS: Final = 3  # a longer axis has no room for 2 and 5 of each
_MIN_TICKS: Final = 2  # fewer give no scale


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: (x, y) in drawing order. Without a name it is not in the legend."""

    points: Sequence[tuple[float, float]]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `start` to `end`, drawn with round numbers."""

    start: float
    end: float
    is_log: bool

    def place(self, value: float) -> float:
        """0 at the start, 1 at the end."""
        if self.is_log:
            return math.log(value / self.start) / math.log(self.end / self.start)
        return (value - self.start) / (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers on the axis: where it is logarithmic and long powers of ten, where it is short even steps."""
        if self.is_log:
            digits = (1, 2, 5) if math.log10(self.end / self.start) <= _MAX_DECADES_WITH_DIGITS else (1,)
            powers = range(math.floor(math.log10(self.start)), math.ceil(math.log10(self.end)) + 1)
            ticks = self._within([digit * 10.0**power for power in powers for digit in digits])
            if len(ticks) >= _MIN_TICKS:
                return ticks
        step = _round_step((self.end - self.start) / 5)
        numbers = range(math.floor(self.start / step), math.floor(self.end / step) + 1)
        return self._within([step * number for number in numbers])

    def _within(self, ticks: list[float]) -> list[float]:
        return [tick for tick in ticks if self.start * 0.999 <= tick <= self.end * 1.001]


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, *, has_log_y: bool = False) -> str:
    """An SVG element. Linear axes begin at 0; a logarithmic one leaves out what is not positive."""
    if has_log_y:
        lines = [Line([(x, y) for x, y in line.points if y > 0], line.name) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="empty">Nothing was measured.</p>'
    x_axis = Axis(0.0, max(x for x, _ in points) or 1.0, is_log=False)
    y_axis = _axis([y for _, y in points], is_log=has_log_y)
    named = [(line.name, colour) for line, colour in zip(lines, _colours(len(lines)), strict=True) if line.name]
    height = _HEIGHT + _LINE_HEIGHT * len(named)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">',
        *_grid(x_axis, y_axis, x_label, y_label),
        *(_path(line, colour, x_axis, y_axis) for line, colour in zip(lines, _colours(len(lines)), strict=True)),
        *(_legend(number, name, colour) for number, (name, colour) in enumerate(named)),
        "</svg>",
    ]
    return "\n".join(parts)


def short_number(value: float) -> str:
    """At most three or four digits, as people write them: 0.25, 12.5, 1,234, 5.6M."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    if size >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _axis(values: Sequence[float], *, is_log: bool) -> Axis:
    largest = max(values)
    if not is_log:
        return Axis(0.0, largest * 1.05 if largest > 0 else 1.0, is_log=False)
    least = min(values)
    return Axis(least / 1.2, largest * 1.2, is_log=True)


def _round_step(least: float) -> float:
    """The least of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * 0.999)


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _x(axis: Axis, value: float) -> float:
    return round(_LEFT + axis.place(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - axis.place(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in y_axis.ticks():
        y = _y(y_axis, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{short_number(tick)}</text>')
    for tick in x_axis.ticks():
        x = _x(x_axis, tick)
        parts.append(f'<line class="grid" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{short_number(tick)}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{bottom + 36}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="rotate(-90 16 {middle_y})"'
    parts.append(f'<text x="16" y="{middle_y}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return parts


def _path(line: Line, colour: str, x_axis: Axis, y_axis: Axis) -> str:
    places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in line.points]
    text = " ".join(f"{x},{y}" for x, y in places)
    drawn = f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{text}"/>'
    if len(places) > _MAX_MARKED_POINTS:
        return drawn
    dots = [
        f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>{escape(line.name)} '
        f"({short_number(value_x)}, {short_number(value_y)})</title></circle>"
        for (x, y), (value_x, value_y) in zip(places, line.points, strict=True)
    ]
    return drawn + "".join(dots)


def _legend(number: int, name: str, colour: str) -> str:
    y = _HEIGHT + number * _LINE_HEIGHT
    return (
        f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + 24}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
        f'<text x="{_LEFT + 32}" y="{y + 4}">{escape(name)}</text>'
    )
