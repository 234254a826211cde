"""What the GPU check leaves: results.json for programs, results.md for people."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
Row = dict[str, object]


@dataclass(frozen=True)
class Result:
    """How a step ended. `reason` is empty if it passed."""

    number: int
    name: str
    status: str
    reason: str
    rows: list[Row]  # of its table; same keys in each, or fewer
    said: str = ""  # of a failed step: the end of what its process printed
    seconds: float = 0.0  # that it took, the start of its process included


def write_report(results: Sequence[Result], device: str, out: Path) -> str:
    """Write both files; yields the text of results.md."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    machine = next((result.rows[0] for result in results if result.name == "environment" and result.rows), {})
    fields = {"date": date, "device": device, "machine": machine, "steps": [asdict(result) for result in results]}
    text = _rendered(results, date, device, machine)
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "results.json", json.dumps(fields, indent=2) + "\n")
    _replace(out / "results.md", text)
    return text


def _replace(path: Path, text: str) -> None:
    """Whoever is killed meanwhile leaves what was there before."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _rendered(results: Sequence[Result], date: str, device: str, machine: Row) -> str:
    """The table of all steps comes last, where a terminal shows it."""
    lines = ["# GPU check", "", f"- date: {date}", f"- device: {device}"]
    lines += [f"- {name}: {value}" for name, value in machine.items()] or ["- card, driver, versions: not known"]
    for result in results:
        if result.rows and result.name != "environment":
            keys = list(dict.fromkeys(key for row in result.rows for key in row))
            cells = [[row.get(key, "") for key in keys] for row in result.rows]
            lines += ["", f"## {result.number}. {result.name}", "", *table(keys, cells)]
        if result.said:
            lines += [
                "",
                f"What {result.name} printed at last:",
                "",
                *(f"    {line}" for line in result.said.splitlines()),
            ]
    steps = [(each.number, each.name, each.status, f"{each.seconds:.1f}", each.reason) for each in results]
    lines += ["", "## Steps", "", *table(("#", "step", "result", "s", "reason"), steps)]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of Markdown."""
    return [_line(heads), "| --- " * len(heads) + "|", *map(_line, rows)]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", r"\|").split()) for cell in cells) + " |"
