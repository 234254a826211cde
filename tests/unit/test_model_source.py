"""What `--model` names: a model folder, or a source that is exported once, in a format that suits the device."""

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


def test_a_model_folder_is_itself_whatever_the_device_unless_other_weights_are_asked_for(tmp_path: Path) -> None:
    folder = model_folder(write_source(tmp_path / "tiny"), "float32", "cpu")
    assert folder == model_folder(folder, None, "cuda")
    with pytest.raises(ConfigError, match="holds float32 weights, not int8"):
        model_folder(folder, "int8", "cpu")
