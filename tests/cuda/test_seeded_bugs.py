"""The simulator finds bugs seeded into the project's own kernels, each in the run that is meant to find it."""

import re
from pathlib import Path

import pytest

from tests.cuda.seeded_bugs import BUGS, RUNS, Bug
from tests.cudasim.build import missing_sanitizer, missing_tool

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

# One found by each run; the others take minutes.
QUICK = {
    "a maximum that nobody writes",
    "PTX: a pointer not converted to a shared address",
    "copies in flight at the end",
    "a head rotated before other lanes have loaded it",
    "one row too many",
}


def test_every_bug_fits_the_kernels_as_they_are(tmp_path: Path) -> None:
    """Whoever changes a line that a bug is seeded into changes the bug too."""
    for number, bug in enumerate(BUGS):
        bug.seed(tmp_path / str(number))


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name, marks=[] if bug.name in QUICK else [pytest.mark.slow]) for bug in BUGS]
)
def test_seeded_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    if reason := missing_sanitizer(RUNS[bug.finder][0]):
        pytest.skip(reason)
    bug.seed(tmp_path)
    assert re.search(bug.fault, bug.outcome(bug.finder, tmp_path).fault)
