"""One export at a time writes a folder, and what is not a model is never replaced."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from graphs.errors import ExportError
from graphs.export import export_model
from graphs.manifest import Manifest
from graphs.staging import staging_folder
from tests.unit.tiny_export import write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "tiny")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_appears_at_out_during_an_export_is_left_alone(tmp_path: Path, source: Path):
    def write_thesis(stage: str, num_done: int, num_parts: int) -> None:
        (tmp_path / "tiny").mkdir(exist_ok=True)
        (tmp_path / "tiny" / "thesis.txt").write_text("mine")

    with pytest.raises(ExportError, match="exists and is not a model folder; it is left alone"):
        export_model(source, tmp_path / "tiny", "float32", overwrite=True, progress=write_thesis)
    assert names(tmp_path) == ["tiny"]
    assert names(tmp_path / "tiny") == ["thesis.txt"]


def test_two_exports_to_one_folder_at_a_time_are_refused_and_a_third_after_them_works(tmp_path: Path, source: Path):
    out, same, refusals = tmp_path / "models" / "tiny", tmp_path / "alias" / "tiny", []
    (tmp_path / "alias").symlink_to(tmp_path / "models")

    def export_again(stage: str, num_done: int, num_parts: int) -> None:
        for path in (out, same):
            with pytest.raises(ExportError) as refusal:
                export_model(source, path, "int8", overwrite=True)
            refusals.append(str(refusal.value))

    export_model(source, out, "float32", progress=export_again)
    assert set(refusals) == {f"{path}: another export is writing it" for path in (out, same)}
    assert names(tmp_path / "models") == ["tiny"]
    assert Manifest.load(out).weight_format == "float32"
    export_model(source, out, "int8", overwrite=True)
    assert Manifest.load(out).weight_format == "int8"


def test_a_lock_that_a_killed_export_left_is_no_obstacle(tmp_path: Path, source: Path):
    (tmp_path / ".tiny.lock").write_text("")
    export_model(source, tmp_path / "tiny", "float32")
    assert names(tmp_path) == ["tiny"]


def leave_orphan(out: Path) -> Path:
    """What an export to `out` leaves when it is killed while it writes."""
    with staging_folder(out) as folder:
        pass
    folder.mkdir()
    (folder / "weights.bin").write_text("half of them")
    return folder


def test_what_a_killed_export_left_is_removed_by_the_next_one_to_the_same_folder(tmp_path: Path) -> None:
    orphan = leave_orphan(tmp_path / "tiny")
    others = [leave_orphan(tmp_path / name) for name in ("tiny.gguf", "teeny", "tiny-int8")]
    (tmp_path / ".tiny.mine").mkdir()
    (tmp_path / ".tiny.mine.partial").write_text("no folder")
    with capture_logs() as logs, staging_folder(tmp_path / "tiny"):
        assert not orphan.exists()
    assert [(log["event"], log["folder"]) for log in logs] == [("export.orphan_removed", str(orphan))]
    assert sorted([".tiny.mine", ".tiny.mine.partial", *(other.name for other in others)]) == names(tmp_path)


def test_what_an_export_writes_is_no_orphan_to_another_one(tmp_path: Path, monkeypatch) -> None:
    with staging_folder(tmp_path / "tiny") as folder:
        with pytest.raises(ExportError, match="another export is writing it"), staging_folder(tmp_path / "tiny"):
            pass
        assert folder.exists()
        monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
        with staging_folder(tmp_path / "tiny"):
            assert folder.exists()


def refusing(number: int) -> Callable[[object, int], None]:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, source: Path, monkeypatch, number: int):
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    export_model(source, tmp_path / "tiny", "float32")
    assert names(tmp_path) == ["tiny"]


def test_a_lock_that_fails_in_another_way_stops_the_export(tmp_path: Path, source: Path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(ExportError, match=rf"tiny: cannot be written: .*{os.strerror(errno.EIO)}"):
        export_model(source, tmp_path / "tiny", "float32")
