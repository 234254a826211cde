"""The reference model against a second one of plain loops, its cache against itself, and calibration by hand."""

import cmath
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from graphs.calibration import (
    RelativeMoments,
    RelativeRms,
    calibration_texts,
)
from graphs.channel_store import calibrate
from graphs.reference import KeyValueCache, ReferenceModel, log_softmax
from graphs.rope import Llama3Scaling, RopeSpec
from graphs.spec import ModelSpec
from graphs.weights import open_source
from tests.unit.tiny_export import write_tokenizer_json
from tests.unit.tiny_models import MemorySource, hf_tensors, random_source, tiny_config, write_gguf, write_hf

TOKENS = [3, 17, 5, 5, 11, 0, 8]
PLAIN = ModelSpec(
    name="tiny",
    architecture="llama",
    vocab_size=19,
    hidden_size=12,
    intermediate_size=10,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    context_length=64,
    norm_epsilon=1e-5,
    rope=RopeSpec(10000.0, 6),
    tie_word_embeddings=False,
    eos_token_ids=(2,),
)
VARIANTS = {
    "plain": PLAIN,
    "tied, biases": replace(PLAIN, tie_word_embeddings=True, has_qkv_bias=True, has_o_bias=True),
    "one kv head": replace(PLAIN, num_kv_heads=1),
    "no sharing, partly rotated": replace(PLAIN, num_kv_heads=4, rope=RopeSpec(100.0, 4)),
    "llama3 scaling": replace(PLAIN, rope=RopeSpec(1000.0, 6, Llama3Scaling(8.0, 1.0, 4.0, 32))),
    "window, soft cap, q/k norm": replace(PLAIN, sliding_window=3, softcap=0.7, has_qk_norm=True),
}


def loops(source: MemorySource, token_ids: list[int]) -> list[list[float]]:
    """Logits by sums over scalars; queries and keys rotate as complex numbers."""
    spec, half = source.spec, source.spec.rope.rotary_dim // 2

    def tensor(name: str) -> list:
        return source.float32(name).astype(np.float64).tolist()

    def norm(x: list[float], weight: list[float]) -> list[float]:
        size = math.sqrt(math.fsum(v * v for v in x) / len(x) + spec.norm_epsilon)
        return [v / size * w for v, w in zip(x, weight, strict=True)]

    def project(x: list[float], layer: int, part: str, has_bias: bool = False) -> list[float]:
        rows = tensor(f"layers.{layer}.{part}")
        bias = tensor(f"layers.{layer}.{part}.bias") if has_bias else [0.0] * len(rows)
        return [math.fsum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]

    def heads(x: list[float]) -> list[list[float]]:
        return [x[start : start + spec.head_dim] for start in range(0, len(x), spec.head_dim)]

    def rotate(head: list[float], position: int) -> list[float]:
        turned = [
            complex(head[i], head[i + half]) * cmath.exp(1j * position * frequency)
            for i, frequency in enumerate(spec.rope.frequencies().tolist())
        ]
        return [z.real for z in turned] + [z.imag for z in turned] + head[2 * half :]

    def prepare(x: list[float], layer: int, part: str, position: int) -> list[list[float]]:
        split = heads(project(x, layer, part, spec.has_qkv_bias))
        if spec.has_qk_norm:
            split = [norm(head, tensor(f"layers.{layer}.{part}_norm")) for head in split]
        return [rotate(head, position) for head in split]

    def attend(query: list[float], position: int, keys: list, values: list) -> list[float]:
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        seen = range(first, position + 1)
        scores = [
            math.fsum(a * b for a, b in zip(query, keys[j], strict=True)) / math.sqrt(spec.head_dim) for j in seen
        ]
        if spec.softcap:
            scores = [spec.softcap * math.tanh(score / spec.softcap) for score in scores]
        shares = [math.exp(score) for score in scores]
        return [
            math.fsum(share * values[j][d] for share, j in zip(shares, seen, strict=True)) / math.fsum(shares)
            for d in range(spec.head_dim)
        ]

    hidden = [tensor("embed")[token] for token in token_ids]
    for layer in range(spec.num_layers):
        normed = [norm(x, tensor(f"layers.{layer}.norm1")) for x in hidden]
        queries = [prepare(x, layer, "q", position) for position, x in enumerate(normed)]
        keys = [prepare(x, layer, "k", position) for position, x in enumerate(normed)]
        values = [heads(project(x, layer, "v", spec.has_qkv_bias)) for x in normed]
        for position in range(len(hidden)):
            mixed: list[float] = []
            for head in range(spec.num_heads):
                shared = head * spec.num_kv_heads // spec.num_heads
                mixed += attend(
                    queries[position][head], position, [k[shared] for k in keys], [v[shared] for v in values]
                )
            out = project(mixed, layer, "o", spec.has_o_bias)
            hidden[position] = [a + b for a, b in zip(hidden[position], out, strict=True)]
            x = norm(hidden[position], tensor(f"layers.{layer}.norm2"))
            gates, ups = project(x, layer, "gate"), project(x, layer, "up")
            gated = [g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups, strict=True)]
            hidden[position] = [a + b for a, b in zip(hidden[position], project(gated, layer, "down"), strict=True)]
    final = [norm(x, tensor("final_norm")) for x in hidden]
    return [[math.fsum(w * v for w, v in zip(row, x, strict=True)) for row in tensor("head")] for x in final]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_plain_loops(name: str) -> None:
    source = random_source(VARIANTS[name])
    logits = ReferenceModel(source).forward(TOKENS)

    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, loops(source, TOKENS), rtol=1e-11, atol=1e-12)


def test_float32_stays_float32_and_close_to_float64() -> None:
    source = random_source(VARIANTS["window, soft cap, q/k norm"])
    logits = ReferenceModel(source, np.float32).forward(TOKENS)

    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, ReferenceModel(source).forward(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunks", [[7], [3, 4], [1] * 7])
def test_tokens_in_chunks_with_a_cache_give_the_logits_of_all_at_once(name: str, chunks: list[int]) -> None:
    model, cache = ReferenceModel(random_source(VARIANTS[name])), KeyValueCache()
    parts = [model.forward(TOKENS[cache.num_tokens : cache.num_tokens + size], cache) for size in chunks]

    assert cache.num_tokens == len(TOKENS)
    np.testing.assert_allclose(np.concatenate(parts), model.forward(TOKENS), rtol=1e-12, atol=1e-12)


def test_greedy_takes_the_largest_logit_each_time_and_ends_at_an_end_token() -> None:
    source = random_source(PLAIN)
    model, expected = ReferenceModel(source), list[int]()
    for _ in range(4):
        expected.append(int(np.argmax(loops(source, TOKENS + expected)[-1])))
    ending = replace(source, spec=replace(PLAIN, eos_token_ids=(expected[1],)))

    assert model.greedy(TOKENS, 4) == expected
    assert ReferenceModel(ending).greedy(TOKENS, 4) == expected[:2]


def test_the_observer_sees_the_input_of_every_gemm_once() -> None:
    seen: dict[str, np.ndarray] = {}
    model = ReferenceModel(source := random_source(PLAIN))

    logits = model.forward(TOKENS, observe=lambda name, x: seen.setdefault(name, x.copy()) is x)

    shapes = {name: x.shape for name, x in seen.items()}
    per_layer = {"qkv": (7, 12), "o": (7, 24), "gate_up": (7, 12), "down": (7, 10)}
    expected = {f"layers.{layer}.{gemm}": shape for layer in (0, 1) for gemm, shape in per_layer.items()}
    assert shapes == expected | {"head": (7, 12)}
    np.testing.assert_allclose(seen["head"] @ source.float32("head").T, logits, rtol=1e-12)
    first = source.float32("embed")[TOKENS].astype(np.float64)
    rms = np.sqrt((first**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(seen["layers.0.qkv"], first / rms * source.float32("layers.0.norm1"), rtol=1e-12)


def test_large_activations_give_no_overflow() -> None:
    source = random_source(PLAIN)
    large = {
        name: values * 1e4 if name.endswith(("gate", "q", "k")) else values for name, values in source.tensors.items()
    }
    assert np.isfinite(ReferenceModel(replace(source, tensors=large), np.float32).forward(TOKENS)).all()


def test_gguf_and_hugging_face_forms_give_the_same_logits(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = hf_tensors(config)
    hf = write_hf(tmp_path / "tiny", config, tensors)
    gguf = write_gguf(tmp_path / "tiny.gguf", config, tensors)

    # GGUF's metadata hold float32: epsilon and theta differ by their rounding.
    expected = ReferenceModel(open_source(hf)).forward(TOKENS)
    np.testing.assert_allclose(ReferenceModel(open_source(gguf)).forward(TOKENS), expected, rtol=1e-6, atol=1e-7)


def test_log_softmax_is_exact_for_large_logits() -> None:
    np.testing.assert_allclose(log_softmax(np.array([[1e5, 1e5 + math.log(3)]])), [[math.log(0.25), math.log(0.75)]])


def test_relative_rms_by_hand() -> None:
    stats = RelativeRms()
    stats("a", np.array([[3.0, 4.0], [0.0, 0.0]]))  # rms 5 / sqrt(2); the row of zeros counts for nothing
    stats("a", np.array([[1.0, 1.0]]))

    expected = [math.sqrt((2 * 9 / 25 + 1) / 2), math.sqrt((2 * 16 / 25 + 1) / 2)]
    np.testing.assert_allclose(stats.result()["a"], expected, rtol=1e-15)


def test_relative_moments_by_hand() -> None:
    moments = RelativeMoments()
    moments("a", np.array([[3.0, 4.0], [0.0, 0.0]]))  # rms 5 / sqrt(2); the row of zeros counts for nothing
    moments("a", np.array([[10.0, -10.0]]))
    moments("b", np.array([[2.0, 2.0]]))

    expected = [[2 * 9 / 25 + 1, 2 * 12 / 25 - 1], [2 * 12 / 25 - 1, 2 * 16 / 25 + 1]]
    np.testing.assert_allclose(moments.result()["a"], expected, rtol=1e-6)
    np.testing.assert_array_equal(moments.result()["b"], [[1, 1], [1, 1]])


def test_calibration_sees_what_every_gemm_reads_over_all_its_texts(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    source = random_source(replace(PLAIN, vocab_size=256))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model, rows = ReferenceModel(source), dict[str, list[np.ndarray]]()
    for text in calibration_texts():
        ids = tokenizer.encode(text).ids[: source.spec.context_length]
        model.forward(ids, observe=lambda name, x: rows.setdefault(name, []).append(x.copy()))

    found = calibrate(source, tmp_path / "tokenizer.json")

    assert set(found.relative_rms) == set(found.second_moments) == set(rows)
    for name, parts in rows.items():
        x = np.concatenate(parts)
        relative = x / np.sqrt((x**2).mean(axis=1, keepdims=True))
        np.testing.assert_allclose(found.relative_rms[name], np.sqrt((relative**2).mean(axis=0)), rtol=1e-4)
        moments = relative.T @ relative
        np.testing.assert_allclose(found.second_moments[name], moments, rtol=0, atol=1e-4 * moments.max())


def test_a_model_that_keeps_no_layers_computes_the_same_and_reads_each_pass_anew() -> None:
    source, reads = random_source(PLAIN), list[str]()

    @dataclass(frozen=True)
    class Watched:
        spec: ModelSpec = source.spec
        path: Path = source.path

        def float32(self, name: str) -> np.ndarray:
            reads.append(name)
            return source.float32(name)

        def blocks(self, name: str) -> None:
            return None

    kept, model = ReferenceModel(source), ReferenceModel(Watched(), keeps_layers=False)
    assert not [name for name in reads if name.startswith("layers.")]
    for num_passes in (1, 2):
        np.testing.assert_array_equal(model.forward(TOKENS), kept.forward(TOKENS))
        assert [reads.count(f"layers.{layer}.down") for layer in range(PLAIN.num_layers)] == (
            [num_passes] * PLAIN.num_layers
        )


def test_calibration_texts_are_many_and_none_is_an_evaluation_text() -> None:
    texts = calibration_texts()
    golden = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text())

    assert len(texts) == 25
    assert all(len(text) > 50 and text == text.strip() for text in texts)
    assert 10_000 <= sum(len(text.encode()) for text in texts) <= 14_000
    evaluation = " ".join(case["text"] + case["output_text"] for case in golden["cases"])
    assert not any(text[:40] in evaluation for text in texts)
