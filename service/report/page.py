"""One HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from service.report.chart import short_number

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1340px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .5em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1.5em }
figure { margin: 0 } figcaption { font-weight: 600 } figcaption small { font-weight: 400; color: #555; display: block }
svg { width: 100%; height: auto; font-size: 12px } svg .grid { stroke: #e5e5e5 } svg text { fill: #444 }
.empty { color: #777 } pre { background: #f6f6f6; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere }
"""

LATENCY_COLUMNS: Final = ("mean", "median", "std", "p90", "p95", "p99")


def html_page(title: str, parts: Sequence[str]) -> str:
    """A whole document around `parts`, which are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """A section's title."""
    return f"<h2>{escape(text)}</h2>"


def preformatted(text: str) -> str:
    """Text as it stands: a command, a document."""
    return f"<pre>{escape(text)}</pre>"


def figure(caption: str, chart: str, note: str = "") -> str:
    """A picture under its caption. `chart` is HTML, the rest is text."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(caption)}{small}</figcaption>\n{chart}\n</figure>"


def figures(parts: Sequence[str]) -> str:
    """Pictures side by side, as many as the window holds."""
    return '<div class="figures">\n' + "\n".join(parts) + "\n</div>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers are shortened, and None, which was not measured, is a dash."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def latency_table(latencies_ms: Mapping[str, Mapping[str, float | None]]) -> str:
    """One row per metric, its mean, median, deviation and percentiles in milliseconds."""
    rows = [[name, *(values[column] for column in LATENCY_COLUMNS)] for name, values in latencies_ms.items()]
    return table(["milliseconds", *LATENCY_COLUMNS], rows)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    return short_number(value)
