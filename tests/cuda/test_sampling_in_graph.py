"""Sampling as the graph's last op: what is sampled there, what the host samples, and that replays follow the step."""

import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphs.manifest import DECODE_NAME, PREFILL_NAME, WEIGHTS_NAME, Manifest
from service.core.types import Request, SamplingParams
from service.executor.bound_session import session_options
from service.executor.cuda.graph import cuda_graph
from service.executor.cuda.launch import FLOAT16 as FLOAT16_TYPE
from service.executor.cuda.row_edits import DividedJob, SamplingBounds
from service.executor.cuda.sample_outputs import SampleOutputs
from service.executor.cuda.sampling import HostSampler, SampledRows
from service.executor.cuda.session import OrtSession
from service.executor.op_library import OpLibrary
from service.executor.sampler import Sampler, SamplingJob
from tests.cuda.conftest import VOCAB_SIZE
from tests.cuda.host_device import HostDevice
from tests.cuda.simulated_kernels import FLOAT16
from tests.cuda.test_executor import GREEDY, SAMPLED, decode_plan, requests
from tests.stepping import run_requests
from tests.unit.edit_cases import edit_of

EDITED = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1)
BIASED = replace(GREEDY, logit_bias=((7, 3.0), (9, -100.0)))
HELD = replace(GREEDY, min_tokens=6, stop_token_ids=tuple(range(3, VOCAB_SIZE, 2)))
FEATURES = {"penalties": EDITED, "bias": BIASED, "min_tokens": HELD, "logprobs": replace(SAMPLED, num_logprobs=5)}
NUM_TOKENS = 40
NOTHING_FITS = SamplingBounds(max_edits=1, max_top=1)


def dispatched(made, context_lens: list[int], sampling: list[SamplingParams]) -> list[int]:
    """The tokens of a decode step of sequences with these parameters, as the BatchState has them."""
    plan, batch = decode_plan(made, context_lens)
    for row, params in enumerate(sampling):
        batch.seq_ids[row] = 100 + row
        batch.requests[row] = Request(100 + row, np.zeros(1, np.int32), params)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(batch, name)[row] = getattr(params, name)
    made.device.events.clear()
    return made.executor.dispatch(plan, batch).wait().token_ids.tolist()


@pytest.mark.parametrize("sampling", FEATURES.values(), ids=FEATURES)
def test_the_device_and_the_host_sample_the_same_tokens(host_executor, sampling: SamplingParams) -> None:
    """And other tokens than without penalties, bias and bans; log-probabilities change none."""
    asked = requests(replace(sampling, num_logprobs=max(sampling.num_logprobs, 2)))
    on_device, on_host = host_executor(), host_executor(bounds=NOTHING_FITS)
    found, expected = (run_requests(made.executor, asked) for made in (on_device, on_host))
    assert expected.tokens == found.tokens
    plain = run_requests(on_device.executor, requests(SAMPLED if sampling.temperature else GREEDY)).tokens
    assert (sampling is FEATURES["logprobs"]) == (plain == found.tokens)
    for seq_id, entries in expected.logprobs.items():
        for its, ours in zip(entries, found.logprobs[seq_id], strict=True):
            assert its.chosen == pytest.approx(ours.chosen, abs=1e-5)
            assert its.top_token_ids.tolist() == ours.top_token_ids.tolist()
            assert its.top_logprobs == pytest.approx(ours.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("sampling", FEATURES.values(), ids=FEATURES)
def test_tokens_are_the_cpu_executors_until_a_near_tie(host_executor, cpu_executor, sampling: SamplingParams) -> None:
    """A tie is near if a bias that small makes the CPU take the device's token as well."""
    asked = requests(replace(sampling, max_tokens=NUM_TOKENS))
    found, expected = (run_requests(each, asked).tokens for each in (host_executor().executor, cpu_executor))
    num_equal = 0
    for request in asked:
        ours, its = found[request.seq_id], expected[request.seq_id]
        end = next((i for i, pair in enumerate(zip(ours, its, strict=True)) if len(set(pair)) > 1), len(its))
        num_equal += end
        if end < len(its):
            nudged = run_requests(cpu_executor, [biased(request, {ours[end]: 0.05, its[end]: -0.05})])
            assert ours[: end + 1] == nudged.tokens[request.seq_id][: end + 1]
    assert num_equal > 0.8 * sum(map(len, expected.values())), "most of the texts were compared"


def biased(request: Request, biases: dict[int, float]) -> Request:
    """`request` with these biases on top of its own."""
    own = dict(request.sampling.logit_bias)
    summed = {token_id: own.get(token_id, 0.0) + biases.get(token_id, 0.0) for token_id in own | biases}
    return replace(request, sampling=replace(request.sampling, logit_bias=tuple(summed.items())))


def test_what_every_row_may_ask_for_comes_with_the_tokens(host_executor) -> None:
    """Edits are one copy more on the way in; nothing more comes back unless log-probabilities are asked for."""
    made = host_executor(capture="eager")
    made.executor.warm_up()
    ends = {"plain": ["copy_out"], "logprobs": ["copy_out"] * 4}
    for sampling, begins, end in (
        (SAMPLED, [], "plain"),
        (EDITED, ["copy_in_rows"], "plain"),
        (BIASED, ["copy_in_rows"], "plain"),
        (replace(SAMPLED, num_logprobs=3), [], "logprobs"),
    ):
        dispatched(made, [70, 5, 9], [SAMPLED, sampling, SAMPLED])
        assert ["copy_in", "copy_in_rows", *begins, "replay", *ends[end], "mark", "wait"] == made.device.events
    dispatched(made, [70, 5, 9], [SAMPLED, replace(SAMPLED, num_logprobs=0), SAMPLED])
    assert ["copy_out", "copy_out", "mark", "wait"] == made.device.events[-4:]


def test_rows_that_the_host_samples_leave_the_others_to_the_device(host_executor) -> None:
    """Every other request has penalties; 40 edits are one or two of them. All get what they get alone."""
    made = host_executor(deterministic="on", bounds=SamplingBounds(max_edits=40))
    asked = [
        replace(request, sampling=replace(EDITED if request.seq_id % 2 else SAMPLED, seed=request.seq_id))
        for request in requests(SAMPLED)
    ]
    together = run_requests(made.executor, asked).tokens
    whole = host_executor(deterministic="on").executor
    assert together == {request.seq_id: run_requests(whole, [request]).tokens[request.seq_id] for request in asked}


def test_only_rows_that_do_not_fit_have_their_logits_copied_back(host_executor) -> None:
    """Two biases fit, and the two of the next row do not; a third of its kind asks for too much of another."""
    sampling = [SAMPLED, BIASED, replace(BIASED, seed=1), replace(SAMPLED, num_logprobs=3)]
    lens = [70, 5, 9, 64]
    roomy, narrow = host_executor(), host_executor(bounds=SamplingBounds(max_edits=3, max_top=2))
    for made in (roomy, narrow):
        made.executor.warm_up()
    expected = dispatched(roomy, lens, sampling)
    assert ["replay", *["copy_out"] * 4, "mark", "wait"] == roomy.device.events[-7:]
    assert expected == dispatched(narrow, lens, sampling)
    assert ["replay", *["copy_out"] * 3, "mark", "wait"] == narrow.device.events[-6:]


def test_a_replay_samples_by_its_own_steps_parameters(host_executor) -> None:
    """Temperature, seeds, edits and what is reported change between two replays of one graph."""
    made = host_executor(capture_buckets=(4,))
    made.executor.warm_up()
    eager = host_executor(capture="off")
    steps = [
        [replace(SAMPLED, seed=1)] * 3,
        [replace(SAMPLED, seed=2)] * 3,
        [GREEDY, replace(BIASED, logit_bias=((7, 100.0),)), replace(SAMPLED, seed=1, num_logprobs=2)],
        [GREEDY] * 3,
    ]
    expected = [dispatched(eager, [70, 5, 9], sampling) for sampling in steps]
    made.session.run_ids.clear()
    assert expected == [dispatched(made, [70, 5, 9], sampling) for sampling in steps]
    assert [2] * 4 == made.session.run_ids
    assert 4 == len({tuple(tokens) for tokens in expected})
    assert 7 == expected[2][1]
    assert 7 != expected[3][1]


@pytest.mark.parametrize(
    ("dtype", "bias", "expected"),
    [(np.float16, 0.001, 1), (np.float16, 0.02, 4), (ml_dtypes.bfloat16, 0.02, 1), (ml_dtypes.bfloat16, 0.05, 4)],
)
def test_the_host_rounds_edited_logits_as_the_device_keeps_them(dtype: type, bias: float, expected: int) -> None:
    """8 and 8 + 0.001 are one float16: of tied tokens the first is taken, where float32 would take the other."""
    host = HostSampler(session_options(OpLibrary().path, 1, "off"), (2, 5), dtype)
    params = Sampler(3).params.prefix(3)
    edit = edit_of(replace(GREEDY, logit_bias=((4, bias),)))
    divided = DividedJob(SamplingJob(3, {2: edit}, {}), host_rows=(2,))
    host.take(params, divided.host_rows)
    found = host.finish(divided.job, 0, divided.host_rows, np.array([[0, 8, 1, 2, 8]], dtype))
    assert [expected] == found.token_ids.tolist()
    host.close()


def test_a_row_whose_only_bad_logit_is_banned_is_no_failure_when_the_host_samples_it() -> None:
    """The device, which is not given the ban, has no token for it; for the next row nobody has one."""
    device = HostDevice(launch_address=0)
    host = HostSampler(session_options(OpLibrary().path, 1, "off"), (3, 4), np.float16)
    outputs = SampleOutputs(device, (3, 4), 1, FLOAT16_TYPE)
    rows = SampledRows(device, outputs, host)
    device.bytes_at(outputs.logits, 24).view(np.float16)[:] = [np.nan, 1, 2, 0, 0, np.nan, 0, 0, 3, 0, 0, 0]
    device.bytes_at(outputs.address("token"), 12).view(np.int32)[:] = [-1, -1, 0]
    edits = {row: edit_of(GREEDY, banned=[0]) for row in (0, 1)}
    divided = DividedJob(SamplingJob(3, edits, {}), host_rows=(0, 1))
    rows.enqueue(divided, Sampler(3).params, lane=1)
    device.wait()
    found = rows.finish(divided, lane=1)
    assert ([2, 0], [1]) == (found.token_ids[[0, 2]].tolist(), found.failed.tolist())
    for each in (rows, outputs, host):
        each.close()
    assert 0 == device.num_buffers


def test_many_rows_are_sampled_on_the_host_a_few_at_a_time() -> None:
    """Row r of 19 prefers token r mod 4, is biased to the next one if r is even, and is greedy; row 13 has NaN."""
    num_rows = 19
    device = HostDevice(launch_address=0)
    host = HostSampler(session_options(OpLibrary().path, 1, "off"), (num_rows, 4), np.float16)
    outputs = SampleOutputs(device, (num_rows, 4), 1, FLOAT16_TYPE)
    rows = SampledRows(device, outputs, host)
    logits = device.bytes_at(outputs.logits, 2 * 4 * num_rows).view(np.float16).reshape(num_rows, 4)
    logits[:] = 2 * np.eye(4)[np.arange(num_rows) % 4]
    logits[13, 2] = np.nan
    device.bytes_at(outputs.address("token"), 4 * num_rows).view(np.int32)[:] = 77
    edits = {row: edit_of(replace(GREEDY, logit_bias=(((row + 1) % 4, 5.0),))) for row in range(0, num_rows, 2)}
    divided = DividedJob(SamplingJob(num_rows, edits, {17: 1}), host_rows=tuple(range(1, num_rows)))
    rows.enqueue(divided, Sampler(num_rows).params, lane=0)
    device.wait()
    found = rows.finish(divided, lane=0)
    assert [13] == found.failed.tolist()
    expected = [77, *(row % 4 + (row % 2 == 0) for row in range(1, num_rows))]
    assert np.delete(np.array(expected) % 4, [0, 13]).tolist() == np.delete(found.token_ids, [0, 13]).tolist()
    assert 77 == found.token_ids[0], "the device's own"
    assert [17] == list(found.logprobs)
    assert np.isclose(found.logprobs[17].chosen, 2 - np.log(np.exp(2) + 3), atol=1e-3)
    assert 2 * 4 * 8 == rows._logits.view((2 * 4 * 8,), np.uint8).nbytes == rows._logits._bytes.nbytes
    for each in (rows, outputs, host):
        each.close()
    assert 0 == device.num_buffers


def test_padding_is_sampled_by_nobodys_parameters(host_executor) -> None:
    """Four rows with bans on everything but a token, then three without: the fourth is padding, and is not edited."""
    made = host_executor(capture_buckets=(4,))
    made.executor.warm_up()
    dispatched(made, [9, 9, 9, 9], [replace(SAMPLED, logit_bias=((5, 90.0),), num_logprobs=2)] * 4)
    dispatched(made, [9, 9, 9], [BIASED] * 3)
    buffers = made.executor._runner.decode
    indptr = made.device.bytes_at(buffers.address("edit_indptr"), 20).view(np.int32).tolist()
    assert [0, 2, 4, 6, 6] == indptr
    for name, expected in (("num_logprobs", -1), ("temperature", 0), ("top_k", 0)):
        assert expected == made.device.bytes_at(buffers.address(name), 16).view(np.int32)[3]


def test_a_step_that_asks_for_nothing_undoes_what_the_one_before_asked_for(host_executor) -> None:
    made = host_executor(capture="off")
    dispatched(made, [9, 9], [replace(BIASED, num_logprobs=2)] * 2)
    dispatched(made, [9, 9], [SAMPLED] * 2)
    buffers = made.executor._runner.decode
    for name, expected in (("edit_indptr", [0, 0]), ("num_logprobs", [-1, -1])):
        assert expected == made.device.bytes_at(buffers.address(name), 8).view(np.int32).tolist()


def test_decode_onnx_samples_the_tokens_of_prefill_onnx(host_executor, tiny_float16: Path, tmp_path: Path) -> None:
    """The service loads prefill.onnx alone; here decode.onnx takes its place, with the input that it does without."""
    model = onnx.load(tiny_float16 / DECODE_NAME, load_external_data=False)
    model.graph.input.append(helper.make_tensor_value_info("logit_indices", TensorProto.INT32, ["num_logits"]))
    onnx.save(model, tmp_path / PREFILL_NAME)
    shutil.copy(tiny_float16 / WEIGHTS_NAME, tmp_path)
    expected, made = host_executor(), host_executor()
    info, library = Manifest.load(tiny_float16).model, OpLibrary().path
    graph = cuda_graph(tmp_path / PREFILL_NAME, info, made.device.op_domain, FLOAT16)
    made.session._session = OrtSession.load(tmp_path, graph, library, made.device, captures=False)
    made.executor._runner.bind_kv(made.executor._kv)  # no binding of the other session is left
    sampling = [SAMPLED, replace(EDITED, num_logprobs=2), GREEDY, BIASED, replace(SAMPLED, seed=5)]
    lens = [70, 5, 9, 130, 64]
    assert dispatched(expected, lens, sampling) == dispatched(made, lens, sampling)
