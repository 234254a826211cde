"""What `--model` names: a model folder, or a source that is exported once, in a format that suits the device."""

import json
import os
from pathlib import Path

import pytest

from graphs.manifest import Manifest
from service.commands.model_source import model_folder
from service.errors import ConfigError
from tests.unit.tiny_export import write_source


@pytest.mark.parametrize(
    ("weights", "device", "expected"),
    [(None, "cpu", "w8a8"), (None, "cuda", "float16"), ("int4", "cuda", "int4"), ("float32", "cpu", "float32")],
)
def test_a_source_is_exported_once_in_the_format_asked_for_or_the_devices(
    tmp_path: Path, weights: str | None, device: str, expected: str
) -> None:
    source = write_source(tmp_path / "tiny")
    folder = model_folder(source, weights, device)
    assert tmp_path / f"tiny-{expected}" == folder
    assert expected == Manifest.load(folder).weight_format
    written = (folder / "weights.bin").stat().st_mtime_ns
    assert folder == model_folder(source, weights, device)
    assert written == (folder / "weights.bin").stat().st_mtime_ns


def test_nothing_is_exported_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    source, calls = write_source(tmp_path / "tiny"), []

    def refuse() -> None:
        calls.append(list(tmp_path.iterdir()))
        raise ConfigError("no such device")

    with pytest.raises(ConfigError, match="no such device"):
        model_folder(source, None, "cuda", refuse)
    assert calls == [[source]]
    assert list(tmp_path.iterdir()) == [source]
    folder = model_folder(source, None, "cuda", lambda: None)
    assert folder == model_folder(source, None, "cuda", refuse), "it is there already"


def test_a_model_folder_is_itself_whatever_the_device_unless_other_weights_are_asked_for(tmp_path: Path) -> None:
    folder = model_folder(write_source(tmp_path / "tiny"), "float32", "cpu")
    assert folder == model_folder(folder, None, "cuda")
    with pytest.raises(ConfigError, match="holds float32 weights, not int8"):
        model_folder(folder, "int8", "cpu")


def test_a_source_that_has_changed_is_exported_again_whatever_its_time(tmp_path: Path) -> None:
    source = write_source(tmp_path / "tiny")
    folder = model_folder(source, "float32", "cpu")
    written = (folder / "weights.bin").stat().st_ino
    state = (source / "config.json").stat()
    with (source / "config.json").open("a") as config:
        config.write("\n")
    os.utime(source / "config.json", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert folder == model_folder(source, "float32", "cpu")
    assert written != (folder / "weights.bin").stat().st_ino


def test_an_export_of_another_source_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    folder = model_folder(write_source(tmp_path / "tiny"), "float32", "cpu")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"tiny-float32: was exported from tiny, not from tiny\.gguf"):
        model_folder(tmp_path / "tiny.gguf", "float32", "cpu")
    assert folder == model_folder(tmp_path / "tiny", "float32", "cpu")


def test_a_source_may_be_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_source(tmp_path / "tiny"))
    assert model_folder(Path(), "float32", "cpu") == tmp_path / "tiny-float32"


def test_a_link_that_has_come_to_name_another_source_is_exported_again(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        write_source(tmp_path / version)
    (tmp_path / "current").symlink_to(tmp_path / "v1")
    folder = model_folder(tmp_path / "current", "float32", "cpu")
    written = (folder / "weights.bin").stat().st_ino
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to(tmp_path / "v2")
    assert folder == model_folder(tmp_path / "current", "float32", "cpu")
    assert written != (folder / "weights.bin").stat().st_ino


def test_an_export_by_an_older_release_is_made_again(tmp_path: Path) -> None:
    folder = model_folder(write_source(tmp_path / "tiny"), "float32", "cpu")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["source"] = {"name": "blob"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert Manifest.load(model_folder(tmp_path / "tiny", "float32", "cpu")).source["name"] == "tiny"
