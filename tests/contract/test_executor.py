"""What every executor keeps: the model's own tokens, whatever rides along, and clear refusals."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from graphs.reference import KeyValueCache, ReferenceModel
from graphs.weights import open_source
from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Request, SamplingParams
from service.errors import ConfigError, ExecutorError, ModelFolderError
from service.executor.api import Executor, ExecutorLimits
from service.executor.factory import ExecutorConfig, create_executor
from service.executor.ort import WARM_UP_TOKENS
from service.executor.simulated import SimulatedExecutor
from tests.unit.process_memory import resident_bytes

WEIGHT_FORMATS = ["float32", "float16", "bfloat16", "int8", "int4", "w8a8"]
CONFIG = ExecutorConfig(
    model_dir=Path(), kv_memory="4MiB", max_num_seqs=8, max_num_batched_tokens=48, num_threads=2, block_size=4
)


@pytest.fixture(scope="module")
def executor_of(tiny_export: Callable[[str], Path]) -> Iterator[Callable[[str, str], Executor]]:
    """A function from weight format and KV type to an executor of the tiny model, made once."""
    made: dict[tuple[str, str], Executor] = {}

    def executor(weight_format: str, kv_dtype: str = "auto") -> Executor:
        key = (weight_format, kv_dtype)
        if key not in made:
            made[key] = create_executor(replace(CONFIG, model_dir=tiny_export(weight_format), kv_dtype=kv_dtype))
        return made[key]

    yield executor
    for each in made.values():
        each.close()


def requests(sampling: SamplingParams, lengths: tuple[int, ...] = (1, 3, 17, 30, 9, 45, 4, 12)) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            seq_id=index,
            prompt_token_ids=rng.integers(3, 96, length).astype(np.int32),
            sampling=replace(sampling, seed=1000 + index, max_tokens=sampling.max_tokens + index),
        )
        for index, length in enumerate(lengths)
    ]


GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=20,
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    ignore_eos=True,
)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_samples_that_share_a_prompt_yield_what_each_yields_alone(executor_of, run, kv_dtype: str) -> None:
    executor = executor_of("float32", kv_dtype)
    for length in (5, 8, 17):
        first = replace(requests(SAMPLED, (length,))[0], seq_id=1)
        forks = [
            replace(first, seq_id=seq_id, sampling=replace(first.sampling, seed=1000 + seq_id), fork_of=1)
            for seq_id in (2, 3, 4)
        ]
        together = run(executor, [first, *forks])
        for request in (first, *forks):
            alone = run(executor, [replace(request, fork_of=None)])
            assert alone.tokens[request.seq_id] == together.tokens[request.seq_id]
        assert len({tuple(tokens) for tokens in together.tokens.values()}) == 4


def test_float32_yields_the_reference_models_greedy_tokens(tiny_llama, executor_of, run) -> None:
    reference = ReferenceModel(open_source(tiny_llama))
    asked = requests(replace(GREEDY, num_logprobs=3))
    outcome = run(executor_of("float32"), asked)
    for request in asked:
        cache, known, position = KeyValueCache(), request.prompt_token_ids.tolist(), 0
        for index, token_id in enumerate(outcome.tokens[request.seq_id]):
            logits = reference.forward(known[position:], cache)[-1]
            position = len(known)
            top = np.sort(logits)[::-1]
            assert top[0] - top[1] < 1e-3 or token_id == int(logits.argmax()), (request.seq_id, index)
            logprobs = outcome.logprobs[request.seq_id][index]
            exact = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
            assert np.abs(exact[logprobs.top_token_ids] - logprobs.top_logprobs).max() < 1e-3
            assert abs(exact[token_id] - logprobs.chosen) < 1e-3
            known.append(token_id)
        assert len(outcome.tokens[request.seq_id]) == request.sampling.max_tokens


CASES = [(weights, "auto") for weights in WEIGHT_FORMATS] + [("w8a8", "float32"), ("w8a8", "int8"), ("float32", "int8")]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("weights", "kv_dtype"), CASES)
def test_tokens_do_not_depend_on_company_order_chunks_or_preemption(
    executor_of, run, weights: str, kv_dtype: str, sampling: SamplingParams
) -> None:
    executor, asked = executor_of(weights, kv_dtype), requests(sampling)
    together = run(executor, asked)
    assert together.num_preemptions == 0
    alone = {request.seq_id: run(executor, [request]).tokens[request.seq_id] for request in asked}
    assert alone == together.tokens
    assert alone == run(executor, asked[::-1]).tokens
    assert alone == run(executor, asked, max_num_batched_tokens=8).tokens
    # The longest needs 18 blocks: with 30, the sequences push one another out.
    crowded = run(executor, asked, num_blocks=31)
    assert crowded.num_preemptions > 0
    assert alone == crowded.tokens


@pytest.mark.parametrize(("weights", "kv_dtype"), CASES)
def test_a_conversation_goes_on_from_cached_blocks_as_if_computed_anew(
    executor_of, run, weights: str, kv_dtype: str
) -> None:
    executor, first = executor_of(weights, kv_dtype), requests(GREEDY, (30,))[0]
    said = run(executor, [first]).tokens[first.seq_id]
    history = np.array([*first.prompt_token_ids, *said, 5, 6, 7], np.int32)
    second = replace(first, seq_id=first.seq_id + 1, prompt_token_ids=history)
    anew = run(executor, [second])
    both = run(executor, [first, second], max_num_seqs=1)  # one after the other
    assert (0, 48) == (anew.num_hit_tokens, both.num_hit_tokens)  # the last of 20 tokens is not computed: 49, in fours
    assert {first.seq_id: said, **anew.tokens} == both.tokens


# Mean KL divergence from the float32 model, in nats: what the formats themselves lose, with a margin of two.
MAX_DIVERGENCE = {
    ("float16", "auto"): 1e-5,
    ("bfloat16", "auto"): 1e-4,
    ("int8", "auto"): 4e-3,
    ("int4", "auto"): 2e-1,
    ("w8a8", "auto"): 6e-3,
    ("w8a8", "float32"): 6e-3,
    ("w8a8", "int8"): 6e-3,
    ("float32", "int8"): 1e-3,
}


@pytest.mark.parametrize(("weights", "kv_dtype"), CASES[1:])
def test_lossy_formats_stay_near_the_float32_model(executor_of, run, weights: str, kv_dtype: str) -> None:
    """First tokens only: later ones follow different texts."""
    asked = requests(replace(GREEDY, max_tokens=1, num_logprobs=96))
    asked = [replace(request, sampling=replace(request.sampling, max_tokens=1)) for request in asked]
    exact, found = (run(executor, asked) for executor in (executor_of("float32"), executor_of(weights, kv_dtype)))
    divergences = []
    for seq_id, (expected,) in exact.logprobs.items():
        ours = np.empty(96)
        (logprobs,) = found.logprobs[seq_id]
        ours[logprobs.top_token_ids] = logprobs.top_logprobs
        divergences.append(
            float(np.exp(expected.top_logprobs) @ (expected.top_logprobs - ours[expected.top_token_ids]))
        )
    assert np.mean(divergences) < MAX_DIVERGENCE[weights, kv_dtype]


def test_min_tokens_holds_back_the_stop_token(executor_of, run) -> None:
    free = run(executor_of("float32"), requests(GREEDY)[:1]).tokens[0]
    stop = replace(GREEDY, stop_token_ids=(free[2],))
    assert free[:3] == run(executor_of("float32"), requests(stop)[:1]).tokens[0]
    held = run(executor_of("float32"), requests(replace(stop, min_tokens=8))[:1]).tokens[0]
    assert (free[:2], False, True) == (held[:2], free[2] in held[:8], len(held) >= 8)


def simulated() -> Executor:
    limits = ExecutorLimits(num_blocks=512, block_size=4, max_num_seqs=8, max_num_batched_tokens=48, max_model_len=128)
    return SimulatedExecutor(limits, vocab_size=96)


def test_simulated_tokens_do_not_depend_on_company_order_chunks_or_preemption(run) -> None:
    asked = requests(GREEDY)
    together = run(simulated(), asked)
    assert {r.seq_id: run(simulated(), [r]).tokens[r.seq_id] for r in asked} == together.tokens
    assert together.tokens == run(simulated(), asked[::-1], max_num_batched_tokens=8).tokens
    crowded = run(simulated(), asked, num_blocks=31)
    assert crowded.num_preemptions > 0
    assert together.tokens == crowded.tokens


def chunk_plan(num_scheduled: list[int], samples: list[bool]) -> tuple[StepPlan, BatchState]:
    """Rows that start their prompts, over blocks of their own."""
    batch = BatchState(max_num_seqs=8, max_model_len=128, block_size=4)
    num_rows = len(num_scheduled)
    for row in range(num_rows):
        batch.seq_ids[row] = row
        batch.token_ids[row, :40] = np.arange(3, 43) + row
        batch.num_tokens[row] = batch.num_prompt_tokens[row] = num_scheduled[row] if samples[row] else 40
        batch.block_table[row, :10] = np.arange(1 + 10 * row, 11 + 10 * row)
    plan = StepPlan(
        step_id=0,
        rows=np.arange(num_rows, dtype=np.int32),
        num_scheduled=np.array(num_scheduled, np.int32),
        samples=np.array(samples),
        num_decode_rows=0,
        num_tokens=sum(num_scheduled),
    )
    return plan, batch


@pytest.mark.parametrize("weights", ["float32", "w8a8", "simulated"])
def test_a_step_yields_one_token_per_row_that_samples_and_leaves_the_batch_alone(executor_of, weights: str) -> None:
    executor = simulated() if weights == "simulated" else executor_of(weights)
    for samples in ([True, False, True], [False, False, False], [True, True, True]):
        plan, batch = chunk_plan([5, 1, 40], samples)
        before = {name: value.copy() for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
        result = executor.dispatch(plan, batch).wait()
        assert (sum(samples), np.int32) == (len(result.token_ids), result.token_ids.dtype)
        assert all(np.array_equal(before[name], getattr(batch, name)) for name in before)


def test_warm_up_leaves_the_kv_buffer_as_it_was(tiny_export) -> None:
    executor = create_executor(replace(CONFIG, model_dir=tiny_export("w8a8")))
    executor.warm_up()
    assert not any(array.any() for array in executor.kv_cache)
    executor.close()


@pytest.mark.parametrize(("kv_prefault", "share"), [("off", 0), ("on", 1)])
def test_the_kv_buffers_memory_is_taken_at_the_start_only_when_asked_for(
    tiny_export, kv_prefault: Literal["off", "on"], share: int
) -> None:
    config = replace(CONFIG, model_dir=tiny_export("w8a8"), kv_memory="256MiB", kv_prefault=kv_prefault)
    before_bytes = resident_bytes()
    executor = create_executor(config)
    taken_bytes = resident_bytes() - before_bytes
    executor.close()
    assert taken_bytes == pytest.approx(share * (256 << 20), abs=64 << 20)


def test_warm_up_takes_steps_of_bounded_size_whatever_the_budget(tiny_export, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, model_dir=tiny_export("w8a8"), max_num_batched_tokens=4096, max_num_seqs=1024)
    executor = create_executor(config)
    plans: list[StepPlan] = []
    start = executor._start

    def recorded(plan: StepPlan, batch: BatchState, *, writes_kv: bool) -> object:
        plans.append(plan)
        return start(plan, batch, writes_kv=writes_kv)

    monkeypatch.setattr(executor, "_start", recorded)
    executor.warm_up()
    executor.close()
    chunk = min(WARM_UP_TOKENS, executor.limits.max_model_len)
    assert [chunk, WARM_UP_TOKENS] == [plan.num_tokens for plan in plans]


def test_a_closed_executor_refuses_steps_and_closes_again(tiny_export) -> None:
    executor = create_executor(replace(CONFIG, model_dir=tiny_export("w8a8")))
    plan, batch = chunk_plan([5], [True])
    step = executor.dispatch(plan, batch)
    with pytest.raises(ExecutorError, match="another is in flight"):
        executor.dispatch(plan, batch)
    step.wait()
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError, match="closed"):
        executor.dispatch(plan, batch)


def test_a_failed_step_names_its_cause_and_the_next_one_runs(executor_of) -> None:
    executor = executor_of("float32")
    plan, batch = chunk_plan([5], [True])
    good = executor.dispatch(plan, batch).wait().token_ids
    batch.block_table[0, 0] = 1_000_000
    with pytest.raises(ExecutorError, match=r"a forward pass failed: .*(block_table|slot_mapping)") as caught:
        executor.dispatch(plan, batch).wait()
    assert caught.value.__cause__ is not None
    plan, batch = chunk_plan([5], [True])
    assert good.tolist() == executor.dispatch(plan, batch).wait().token_ids.tolist()


@pytest.mark.parametrize("weights", ["float32", "w8a8"])
def test_a_row_whose_logits_cannot_be_sampled_fails_alone(executor_of, weights: str) -> None:
    executor = executor_of(weights, "float32")
    plan, batch = chunk_plan([5, 5], [True, True])
    good = executor.dispatch(plan, batch).wait()
    assert good.failed.tolist() == []
    for layer in executor.kv_cache:
        layer[batch.block_table[0, :2]] = np.nan
    plan, batch = chunk_plan([1, 5], [True, True])
    batch.num_tokens[0], batch.num_computed_tokens[0] = 5, 4
    result = executor.dispatch(plan, batch).wait()
    assert (result.failed.tolist(), result.token_ids[1]) == ([0], good.token_ids[1])
    # Whoever gets its blocks next meets nothing of it.
    again = executor.dispatch(*chunk_plan([5, 5], [True, True])).wait()
    assert (again.failed.tolist(), again.token_ids.tolist()) == ([], good.token_ids.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_memory": "6000"}, "kv_memory: 6,000 bytes are too few: a block of 4 tokens takes 4,096 bytes"),
        ({"kv_memory": "8191"}, "kv_memory: 8,191 bytes are too few"),
        ({"kv_memory": "a lot"}, "kv_memory: 'a lot'"),
        ({"kv_dtype": "int3"}, "kv_dtype: 'int3'"),
        ({"kv_dtype": "fp8"}, "kv_dtype: 'fp8' does not run on cpu: one of auto, float32, float16, int8"),
        ({"block_size": 5}, "block_size: 5 is not a power of two"),
        ({"max_model_len": 129}, "max_model_len: 129 is more than the model's context of 128"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is less than 1"),
        ({"device": "abacus"}, "device: 'abacus'"),
        ({"host_kv_memory": "1MiB"}, "host_kv_memory: '1MiB' is for device cuda"),
        ({"host_kv_memory": "some"}, "host_kv_memory: 'some' is neither bytes"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_by_name(tiny_export, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_executor(replace(CONFIG, model_dir=tiny_export("float32"), **changes))


@pytest.fixture
def folder(tiny_export, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export("w8a8"), tmp_path / "model"))


def test_the_smallest_kv_buffer_has_two_blocks(tiny_export) -> None:
    executor = create_executor(replace(CONFIG, model_dir=tiny_export("float32"), kv_memory="8192"))
    assert executor.limits.num_blocks == 2
    executor.close()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no such model folder"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: damage(folder / "weights.bin"), "weights.bin has SHA-256"),
        (lambda folder: damage(folder / "prefill.onnx"), "prefill.onnx has SHA-256"),
        (lambda folder: (folder / "weights.bin").write_bytes(b"short"), "weights.bin has 5 bytes"),
        (lambda folder: rewrite_manifest(folder, lambda d: d.update(format_version=99)), "format_version 99 is newer"),
        (lambda folder: rewrite_manifest(folder, lambda d: d["model"].update(num_layers=3)), "has 2 KV inputs"),
    ],
)
def test_bad_model_folders_are_refused_by_name(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(ModelFolderError, match=message):
        create_executor(replace(CONFIG, model_dir=folder))
