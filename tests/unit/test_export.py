"""An export is whole and verified, or it is not there."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import pytest
from tokenizers import Tokenizer, processors

from graphs.errors import ExportError
from graphs.export import export_model
from graphs.fingerprint import source_fingerprint
from graphs.manifest import WEIGHT_FORMATS, Manifest
from tests.unit.tiny_export import write_source
from tests.unit.tiny_models import hf_tensors, tiny_config, write_hf

LAST_TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "tiny")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_every_format_exports_verifies_and_loads(tmp_path: Path, source: Path, weight_format):
    out = tmp_path / "models" / "tiny"
    result = export_model(source, out, weight_format)
    assert names(out) == ["decode.onnx", "manifest.json", "prefill.onnx", "tokenizer.json", "weights.bin"]
    assert names(out.parent) == ["tiny"]
    manifest = Manifest.load(out)
    manifest.verify_files(out)
    assert manifest == result.manifest
    assert manifest.weight_format == weight_format
    assert (manifest.model.vocab_size, manifest.model.num_layers, manifest.model.eos_token_ids) == (256, 2, (2,))
    assert manifest.source == {"name": "tiny", "fingerprint": source_fingerprint(source), "dtype": "float32"}
    assert {"onnx", "numpy"} <= set(manifest.tools)
    assert result.verification.num_tokens > 40
    if weight_format == "float32":
        assert result.verification.top1_agreement == 1.0
        assert result.verification.max_logit_error < 1e-4


@pytest.mark.parametrize("weight_format", ["w8a8", "int4"])
def test_the_same_source_exports_to_the_same_bytes(tmp_path: Path, source: Path, weight_format):
    first = export_model(source, tmp_path / "one", weight_format).manifest
    second = export_model(source, tmp_path / "two", weight_format).manifest
    assert first == second


def test_a_failing_source_leaves_nothing(tmp_path: Path):
    broken = write_source(tmp_path / "source", poison=LAST_TENSOR)
    with pytest.raises(ExportError, match="down"):
        export_model(broken, tmp_path / "models" / "tiny", "float32")
    assert names(tmp_path / "models") == []


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, source: Path):
    def interrupt(stage: str, num_done: int, num_parts: int) -> None:
        if (stage, num_done) == ("writing weights", 3):
            assert len(names(tmp_path / "models")) == 2  # the hidden folder and the lock
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(source, tmp_path / "models" / "tiny", "int8", progress=interrupt)
    assert names(tmp_path / "models") == []


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def unhandled(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that ends the process, also where the tests were started to ignore it, as `nohup` does."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_terminated_export_leaves_nothing(tmp_path: Path, source: Path, unhandled: signal.Signals):
    def terminate(stage: str, num_done: int, num_parts: int) -> None:
        if (stage, num_done) == ("writing weights", 2):
            signal.raise_signal(unhandled)

    with pytest.raises(SystemExit) as ended:
        export_model(source, tmp_path / "models" / "tiny", "float32", progress=terminate)
    assert ended.value.code == 128 + unhandled
    assert names(tmp_path / "models") == []
    assert signal.getsignal(unhandled) is signal.SIG_DFL


def test_a_failed_export_leaves_the_old_folder_as_it_was(tmp_path: Path, source: Path):
    out = tmp_path / "models" / "tiny"
    before = export_model(source, out, "float32").manifest
    broken = write_source(tmp_path / "source", poison=LAST_TENSOR)
    with pytest.raises(ExportError):
        export_model(broken, out, "float32", overwrite=True)
    assert names(out.parent) == ["tiny"]
    before.verify_files(out)


def test_a_model_folder_is_replaced_only_on_request(tmp_path: Path, source: Path):
    out = tmp_path / "tiny"
    export_model(source, out, "float32")
    with pytest.raises(ExportError, match="is a model folder already"):
        export_model(source, out, "int8")
    assert Manifest.load(out).weight_format == "float32"
    export_model(source, out, "int8", overwrite=True)
    assert Manifest.load(out).weight_format == "int8"
    Manifest.load(out).verify_files(out)
    assert names(tmp_path) == ["tiny"]


def test_other_peoples_folders_and_files_are_left_alone(tmp_path: Path, source: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "summer.jpg").write_bytes(b"x")
    with pytest.raises(ExportError, match="exists and is not a model folder"):
        export_model(source, tmp_path / "photos", "float32", overwrite=True)
    with pytest.raises(ExportError, match="exists and is not a folder"):
        export_model(source, tmp_path / "photos" / "summer.jpg", "float32", overwrite=True)
    assert names(tmp_path / "photos") == ["summer.jpg"]


def test_an_empty_folder_is_filled(tmp_path: Path, source: Path):
    (tmp_path / "tiny").mkdir()
    export_model(source, tmp_path / "tiny", "float32")
    assert Manifest.load(tmp_path / "tiny").model.architecture == "llama"


def test_the_out_folder_cannot_be_inside_a_file(tmp_path: Path, source: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        export_model(source, tmp_path / "file" / "tiny", "float32")


@pytest.mark.parametrize(
    ("source_name", "out_name", "message"),
    [
        (b"tiny", b"out\xff", r"out: '.*/out\\udcff' is not allowed: UTF-8 only"),
        (b"tiny\xff", b"out", r"source: 'tiny\\udcff' is not allowed: UTF-8 only"),
        (b"link", b"out", r"name: 'tiny\\udcff' is not allowed: UTF-8 only"),
    ],
)
def test_names_that_are_no_text_are_refused(
    tmp_path: Path, source: Path, source_name: bytes, out_name: bytes, message: str
) -> None:
    odd = tmp_path / os.fsdecode(b"tiny\xff")
    shutil.copytree(source, odd)
    shutil.copytree(source, tmp_path / "tiny")
    (tmp_path / "link").symlink_to(odd)
    before = names(tmp_path)
    with pytest.raises(ExportError, match=message):
        export_model(tmp_path / os.fsdecode(source_name), tmp_path / os.fsdecode(out_name), "float32")
    assert before == names(tmp_path)


def test_an_unknown_weight_format_is_named(tmp_path: Path, source: Path):
    with pytest.raises(ExportError, match="'int3' is not allowed: one of w8a8, int8, int4, float32, float16"):
        export_model(source, tmp_path / "tiny", "int3")


def test_a_source_without_tokenizer_is_refused(tmp_path: Path):
    folder = write_source(tmp_path / "source")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match="tokenizer"):
        export_model(folder, tmp_path / "models" / "tiny", "float32")
    assert names(tmp_path / "models") == []


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(tmp_path: Path):
    folder = write_source(tmp_path / "source", vocab_size=255)
    with pytest.raises(ExportError, match="largest id 255 is not allowed: the model has the ids 0 to 254"):
        export_model(folder, tmp_path / "tiny", "float32")


def test_a_tokenizer_whose_ids_have_a_gap_is_measured_by_the_largest(tmp_path: Path):
    folder = write_source(tmp_path / "source")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"]["e"] = 5000
    path.write_text(json.dumps(document))
    with pytest.raises(ExportError, match="largest id 5000 is not allowed: the model has the ids 0 to 255"):
        export_model(folder, tmp_path / "tiny", "w8a8")


def test_the_manifest_says_what_the_tokenizer_does_about_bos(tmp_path: Path):
    folder = write_source(tmp_path / "source")
    path = folder / "tokenizer.json"
    assert not export_model(folder, tmp_path / "without", "float32").manifest.model.add_bos
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(["b", "$A"], special_tokens=[("b", 65)])
    tokenizer.save(str(path))
    assert export_model(folder, tmp_path / "with", "float32").manifest.model.add_bos


@pytest.mark.parametrize(
    ("weight_format", "value", "message"),
    [
        ("float16", 70000, "embed: 70000 is not allowed: float16 holds at most 65504"),
        ("bfloat16", 3.4e38, r"embed: 3.4e\+38 is not allowed: bfloat16 holds at most 3.38953e\+38"),
    ],
)
def test_weights_too_large_for_16_bits_are_refused(tmp_path: Path, weight_format: str, value: float, message: str):
    folder = write_source(tmp_path / "source")
    config = tiny_config(vocab_size=256)
    tensors = hf_tensors(config)
    tensors["model.embed_tokens.weight"][0, 0] = value
    write_hf(folder, config, tensors)
    with pytest.raises(ExportError, match=message):
        export_model(folder, tmp_path / "tiny", weight_format)


def test_bfloat16_weights_are_stored_as_the_source_has_them(tmp_path: Path):
    folder = write_source(tmp_path / "source")
    config = tiny_config(vocab_size=256)
    write_hf(folder, config, hf_tensors(config), ml_dtypes.bfloat16)
    export_model(folder, tmp_path / "tiny", "bfloat16")
    stored = (tmp_path / "tiny" / "weights.bin").read_bytes()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        assert hf_tensors(config)[name].astype(ml_dtypes.bfloat16).tobytes() in stored


def test_progress_ends_each_stage_complete(tmp_path: Path, source: Path):
    seen: dict[str, tuple[int, int]] = {}

    def record(stage: str, num_done: int, num_parts: int) -> None:
        assert 0 <= num_done <= num_parts
        seen[stage] = (num_done, num_parts)

    export_model(source, tmp_path / "tiny", "w8a8", progress=record)
    assert list(seen) == ["calibrating", "writing weights", "verifying"]
    assert all(num_done == num_parts for num_done, num_parts in seen.values())
    assert seen["writing weights"] == (4, 4)


def test_source_that_changes_during_the_export_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "tiny")

    def touch(stage: str, num_done: int, num_parts: int) -> None:
        os.utime(source / "config.json", ns=(0, 0))

    with pytest.raises(ExportError, match="tiny: has changed while it was exported"):
        export_model(source, tmp_path / "out", "float32", progress=touch)
    assert not (tmp_path / "out").exists()
