"""What would stop an export is said at its start."""

from pathlib import Path

import pytest

from graphs.errors import ExportError
from graphs.export import export_model
from graphs.exportable import needed_memory_bytes, require_exportable
from graphs.weights import open_source
from tests.unit.tiny_export import write_source
from tests.unit.tiny_models import tiny_spec


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "tiny")


def never(stage: str, num_done: int, num_parts: int) -> None:
    raise AssertionError(f"{stage} began")


def test_a_context_too_short_to_verify_is_named(tmp_path: Path):
    for context_length in (8, 7):
        folder = write_source(tmp_path / f"source{context_length}", max_position_embeddings=context_length)
        if context_length == 8:
            export_model(folder, tmp_path / "tiny", "float32")
        else:
            with pytest.raises(ExportError, match="context_length: 7 is too short to verify the graphs: at least 8"):
                export_model(folder, tmp_path / "short", "float32", progress=never)


@pytest.mark.parametrize(
    ("weight_format", "changes", "message"),
    [
        ("float32", {"head_dim": 12}, "head_dim: 12 is not allowed: a multiple of 8"),
        ("w8a8", {"head_dim": 4}, "head_dim: 4 is not allowed: a multiple of 8"),
        ("w8a8", {"hidden_size": 65_794}, "hidden_size: 65794 is not allowed: at most 65793 for w8a8"),
        ("w8a8", {"intermediate_size": 65_794}, "intermediate_size: 65794 is not allowed: at most 65793 for w8a8"),
        ("w8a8", {"num_heads": 4114}, "num_heads * head_dim: 65824 is not allowed: at most 65793 for w8a8"),
        ("int8", {"hidden_size": 80}, "hidden_size: 80 is not allowed: a multiple of 32 for int8"),
        (
            "int4",
            {"num_heads": 5, "num_kv_heads": 1},
            "num_heads * head_dim: 80 is not allowed: a multiple of 32 for int4",
        ),
        ("int4", {"intermediate_size": 97}, "intermediate_size: 97 is not allowed: a multiple of 32 for int4"),
    ],
)
def test_a_model_that_no_graph_computes_is_refused_before_any_work(weight_format: str, changes: dict, message: str):
    with pytest.raises(ExportError) as refusal:
        require_exportable(tiny_spec(**changes), weight_format)
    assert str(refusal.value) == message


def test_a_width_at_the_limit_of_w8a8_is_taken_and_a_wider_one_in_other_formats():
    require_exportable(tiny_spec(hidden_size=65_793, intermediate_size=65_793), "w8a8")
    require_exportable(tiny_spec(hidden_size=65_794), "float16")


def test_blocks_of_32_are_asked_of_the_formats_that_have_them_alone():
    require_exportable(tiny_spec(intermediate_size=160), "int4")
    require_exportable(tiny_spec(intermediate_size=97), "w8a8")
    require_exportable(tiny_spec(intermediate_size=97), "float32")


def test_a_width_that_is_no_whole_number_of_blocks_is_refused_before_any_work(tmp_path: Path):
    folder = write_source(tmp_path / "source", intermediate_size=80)
    with pytest.raises(ExportError, match="intermediate_size: 80 is not allowed: a multiple of 32 for int8"):
        export_model(folder, tmp_path / "tiny", "int8", progress=never)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_head_width_that_the_kernels_lack_is_refused_before_any_work(tmp_path: Path):
    folder = write_source(tmp_path / "source", head_dim=12, attention_bias=False)
    with pytest.raises(ExportError, match="head_dim: 12 is not allowed: a multiple of 8"):
        export_model(folder, tmp_path / "tiny", "w8a8", progress=never)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_memory_that_an_export_needs_is_counted_by_hand():
    """Two layers of 64 x 64 (q, o), 32 x 64 (k, v), 96 x 64 (three of the MLP) and two norms, 50 rows, one norm."""
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64
    rest = 50 * 64 + 64
    assert needed_memory_bytes(tiny_spec(), "float32") == 8 * (2 * layer + rest)
    assert needed_memory_bytes(tiny_spec(num_layers=9), "int4") == 8 * (2 * layer + rest)
    moments = 3 * 64 * 64 + 96 * 96
    assert needed_memory_bytes(tiny_spec(num_layers=9), "w8a8") == 4 * (9 * (layer + moments) + rest + 64 * 64)


def test_an_export_that_does_not_fit_the_memory_is_refused_before_any_work(tmp_path: Path, source: Path):
    needed = needed_memory_bytes(open_source(source).spec, "w8a8")
    with pytest.raises(ExportError, match=r"^memory: an export to w8a8 needs about 0\.0 GiB, 0\.0 GiB are free$"):
        export_model(source, tmp_path / "tiny", progress=never, available_memory_bytes=needed - 1)
    export_model(source, tmp_path / "tiny", available_memory_bytes=needed)
