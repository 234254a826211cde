"""Verification sees what is wrong with an export, and says how far off a sound one is."""

import math
from pathlib import Path

import numpy as np
import pytest

from graphs.errors import ExportError
from graphs.export import export_model
from graphs.verify import compare, verify_export
from graphs.weights import open_source
from tests.unit.tiny_export import write_source


def test_errors_and_divergence_follow_their_formulas():
    expected = [np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])]
    found = [{0: np.log([0.25, 0.5, 0.25]).astype(np.float32), 1: np.log([0.1, 0.8, 0.1]).astype(np.float32)}]
    result = compare(expected, found)
    assert result.num_tokens == 2
    assert result.max_logit_error == pytest.approx(math.log(2), rel=1e-6)
    assert result.mean_logit_error == pytest.approx(2 * math.log(2) / 6, rel=1e-6)
    assert result.top1_agreement == 0.5
    # 0.5 log 2 - 0.25 log 2 on the first row, nothing on the second.
    assert result.mean_kl == pytest.approx(0.25 * math.log(2) / 2, rel=1e-6)


def test_positions_decide_what_is_compared():
    expected = [np.array([[1.0, 0], [0, 1.0], [5.0, 0]])]
    assert compare(expected, [{2: np.array([5.0, 0])}]).max_logit_error == 0


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(ExportError, match="not finite"):
        compare([np.zeros((1, 2))], [{0: np.array([np.nan, 0])}])


@pytest.mark.parametrize("weight_format", ["w8a8", "float32"])
def test_damaged_weights_fail_verification(tmp_path: Path, weight_format: str):
    source = write_source(tmp_path / "source")
    out = tmp_path / "tiny"
    export_model(source, out, weight_format)
    weights = np.fromfile(out / "weights.bin", np.uint8)
    weights[len(weights) // 2 :] = 0
    weights.tofile(out / "weights.bin")
    with pytest.raises(ExportError, match="differ from the reference"):
        verify_export(out, open_source(source), weight_format)


def test_graphs_that_do_not_load_fail_verification(tmp_path: Path):
    source = write_source(tmp_path / "source")
    out = tmp_path / "tiny"
    export_model(source, out, "float32")
    (out / "decode.onnx").write_bytes(b"not a graph")
    with pytest.raises(ExportError, match="the exported graphs do not run"):
        verify_export(out, open_source(source), "float32")
