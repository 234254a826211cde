"""The reference model on a real model: the greedy texts of another implementation, token by token."""

import json
from pathlib import Path

import numpy as np
import pytest

from graphs.reference import ReferenceModel, log_softmax
from graphs.weights import BLOCK_SIZE, open_source, tensor_shapes

CASES = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())["cases"]
CLOSE_CALL = 1e-3  # where the two best logits are nearer than this, rounding may decide


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> ReferenceModel:
    return ReferenceModel(open_source(smollm2_gguf), np.float32)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_teacher_forced_steps_agree_with_the_golden_texts(model: ReferenceModel, case: int) -> None:
    prompt, output = CASES[case]["prompt_token_ids"], CASES[case]["output_token_ids"]
    is_clear = np.array(CASES[case]["top1_top2_gap"]) >= CLOSE_CALL

    logits = model.forward(prompt + output[:-1])[len(prompt) - 1 :].astype(np.float64)

    assert np.array(output)[is_clear].tolist() == logits.argmax(axis=1)[is_clear].tolist()
    np.testing.assert_allclose(log_softmax(logits).max(axis=1), CASES[case]["top1_logprob"], atol=2e-3)


def test_greedy_decoding_reproduces_a_golden_text(model: ReferenceModel) -> None:
    assert CASES[0]["output_token_ids"] == model.greedy(CASES[0]["prompt_token_ids"], max_tokens=48)


def test_the_files_grid_holds_every_matrix_exactly(smollm2_gguf: Path) -> None:
    source = open_source(smollm2_gguf)
    bits = {}
    for name in ("embed", *(f"layers.{layer}.{part}" for layer in (0, 29) for part in ("q", "k", "v", "o", "down"))):
        blocks = source.blocks(name)
        assert blocks is not None
        assert blocks.scales.shape == (blocks.codes.shape[0], blocks.codes.shape[1] // BLOCK_SIZE)
        np.testing.assert_array_equal(blocks.dequantize(), source.float32(name))
        bits[name.rpartition(".")[2]] = blocks.bits

    assert bits == {"embed": 8, "q": 4, "k": 4, "v": 4, "o": 4, "down": 4}
    assert len(tensor_shapes(source.spec)) == 272
