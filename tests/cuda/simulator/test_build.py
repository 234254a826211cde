"""What names a built library, and who may build it."""

import fcntl
from pathlib import Path

import pytest

from tests.cudasim import build

SOURCE = Path(__file__).with_name("faults.cu")


@pytest.mark.skipif(build.missing_tool() is not None, reason=str(build.missing_tool()))
def test_another_compiler_builds_anew(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build, "_compile", lambda sources, target, flags: target.touch())
    monkeypatch.setattr(build, "build_kernels", lambda source, options, flavour, target: target.touch())
    names = []
    for version in ("g++ 13.2.0", "g++ 13.2.0", "g++ 14.1.0"):
        monkeypatch.setattr(build, "compiler_version", lambda version=version: version)
        names.append((build.runtime_library("plain").name, build.kernel_library(SOURCE, (), "plain").name))
    assert names[0] == names[1]
    assert [False, False] == [one == other for one, other in zip(names[1], names[2], strict=True)]


def test_a_lock_holds_for_processes_that_come_after_another_is_done(monkeypatch, tmp_path) -> None:
    """A second one waits with the file open while a first builds; a third opens it when the first is done."""
    monkeypatch.setattr(build, "CACHE", tmp_path)
    target = tmp_path / "kernels.so"
    first, second = build._Building(target), build._Building(target)
    with first as is_missing:
        assert is_missing
    with second, target.with_suffix(".lock").open("w") as third, pytest.raises(BlockingIOError):
        fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
