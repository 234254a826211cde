"""The manifest says what a model folder holds, and names what is wrong with one."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graphs.manifest import FileRecord, Manifest, ManifestError, ModelInfo

MODEL = ModelInfo(
    name="tiny",
    architecture="llama",
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=128,
    bos_token_id=None,
    eos_token_ids=(2, 7),
    add_bos=False,
)
CONTENT = {
    "prefill.onnx": b"prefill",
    "decode.onnx": b"decode",
    "weights.bin": bytes(range(256)) * 9000,  # more than one hashing chunk
    "tokenizer.json": b"{}",
    "chat_template.jinja": "{{ 'grüße' }}".encode(),
}


def write_folder(folder: Path) -> Manifest:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    files = {name: FileRecord.of(folder / name) for name in CONTENT}
    manifest = Manifest(MODEL, "w8a8", files, source={"file": "tiny.gguf"}, tools={"chairlift": "0.1.0"})
    manifest.save(folder)
    return manifest


def edit(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_saved_manifest_loads_equal(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert Manifest.load(tmp_path).model.eos_token_ids == (2, 7)


def test_records_hold_the_digest_and_size_of_the_whole_file(tmp_path: Path) -> None:
    files = write_folder(tmp_path).files
    content = CONTENT["weights.bin"]
    assert files["weights.bin"] == FileRecord(hashlib.sha256(content).hexdigest(), len(content))


def test_an_untouched_folder_verifies(tmp_path: Path) -> None:
    write_folder(tmp_path).verify_files(tmp_path)


def test_a_flipped_byte_is_found_by_its_hash_only(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path)
    content = bytearray(CONTENT["weights.bin"])
    content[-1] ^= 1
    (tmp_path / "weights.bin").write_bytes(content)
    manifest.check_sizes(tmp_path)
    with pytest.raises(ManifestError, match=r"weights\.bin has SHA-256"):
        manifest.verify_files(tmp_path)


def test_a_truncated_file_is_found_by_its_size(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path)
    (tmp_path / "weights.bin").write_bytes(CONTENT["weights.bin"][:-1])
    with pytest.raises(ManifestError, match=r"weights\.bin has 2303999 bytes, the manifest says 2304000"):
        manifest.check_sizes(tmp_path)


def test_a_newer_format_version_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    edit(tmp_path, lambda document: document.update(format_version=4))
    with pytest.raises(ManifestError, match="format_version 4 is newer than 3"):
        Manifest.load(tmp_path)


def test_an_older_format_version_is_to_be_exported_again(tmp_path: Path) -> None:
    write_folder(tmp_path)
    edit(tmp_path, lambda document: document.update(format_version=2))
    with pytest.raises(ManifestError, match=r"format_version 2 is older than 3, .* export the model again"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["prefill.onnx", "decode.onnx", "weights.bin", "tokenizer.json", "chat_template.jinja"]
)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ManifestError, match=f"{name} is missing"):
        Manifest.load(tmp_path)


def test_folders_without_a_manifest_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no manifest\.json; not a model folder"):
        Manifest.load(tmp_path)
    with pytest.raises(ManifestError, match="no such model folder"):
        Manifest.load(tmp_path / "absent")


def test_what_can_be_exported_is_told_apart(tmp_path: Path) -> None:
    gguf, other = tmp_path / "model.gguf", tmp_path / "notes.txt"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00")
    other.write_text("GGU")
    command = f"`chairlift export {gguf} --out DIR` makes one of it"
    with pytest.raises(ManifestError, match=f"{gguf}: is a GGUF file, not a model folder; {command}"):
        Manifest.load(gguf)
    with pytest.raises(ManifestError, match=f"{other}: is a file, not a model folder$"):
        Manifest.load(other)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ManifestError, match="is a Hugging Face folder, not a model folder; `chairlift export "):
        Manifest.load(tmp_path)


def test_a_folder_whose_path_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    write_folder(folder)
    with pytest.raises(ManifestError, match=r"model folder: '.*/m\\udcff' is not allowed: UTF-8 only"):
        Manifest.load(folder)


def test_bad_json_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match=r"manifest\.json: not valid JSON"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ManifestError, match=r"manifest\.json: not valid JSON"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ManifestError, match="must be a JSON object"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("num_layers", 0, "num_layers: 0 is not an integer of at least 1"),
        ("head_dim", 2**31, "head_dim: 2147483648 is not an integer of at least 1 and at most 2147483647"),
        ("num_layers", True, "num_layers: True is not an integer"),
        ("num_layers", "2", "num_layers: '2' is not an integer"),
        ("add_bos", 1, "add_bos: 1 is not true or false"),
        ("eos_token_ids", [2, -1], "eos_token_ids: -1 is not an integer of at least 0"),
        ("eos_token_ids", [2, 256], "eos_token_ids: 256 is not an integer of at least 0 and at most 255"),
        ("eos_token_ids", [2**40], "eos_token_ids: 1099511627776 is not an integer of at least 0 and at most 255"),
        ("bos_token_id", 256, "bos_token_id: 256 is not an integer of at least 0 and at most 255"),
        ("eos_token_ids", 2, "eos_token_ids: 2 is not a list of integers"),
        ("name", None, "name: None is not a string"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, field: str, value: object, complaint: str) -> None:
    write_folder(tmp_path)
    edit(tmp_path, lambda document: document["model"].update({field: value}))  # type: ignore[attr-defined]
    with pytest.raises(ManifestError, match=complaint):
        Manifest.load(tmp_path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    edit(tmp_path, lambda document: document["model"].pop("head_dim"))  # type: ignore[attr-defined]
    with pytest.raises(ManifestError, match=r"manifest\.json: model: head_dim is missing"):
        Manifest.load(tmp_path)


def test_an_unknown_weight_format_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    edit(tmp_path, lambda document: document.update(weight_format="int3"))
    with pytest.raises(
        ManifestError, match="weight_format: 'int3' is none of w8a8, int8, int4, float32, float16, bfloat16"
    ):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("name", ["../weights.bin", "sub/file", "..", "/etc/hostname"])
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    record = {"sha256": "0" * 64, "size_bytes": 1}
    edit(tmp_path, lambda document: document["files"].update({name: record}))  # type: ignore[attr-defined]
    with pytest.raises(ManifestError, match="is not a plain file name"):
        Manifest.load(tmp_path)
