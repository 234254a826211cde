"""Which steps replay which graph, on host memory with graphs as ONNX Runtime treats them."""

from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from service.core.types import SamplingParams
from service.errors import ConfigError, ExecutorError
from service.executor.api import ExecutorLimits
from service.executor.cuda.capture import BucketGraphs, checked_buckets, default_buckets
from service.executor.cuda.memory import DeviceKv
from service.executor.cuda.null_steps import chunk_shapes, null_chunks
from service.executor.cuda.session import EAGER
from tests.cuda.host_executor import HostExecutor
from tests.cuda.numpy_kernels import fixed_arguments
from tests.cuda.test_executor import decode_plan, requests
from tests.stepping import run_requests

BUCKETS = (1, 2, 4)


def run_ids(made: HostExecutor, *context_lens: int) -> list[int]:
    """The graph ids of a decode step's runs."""
    made.session.run_ids.clear()
    made.executor.dispatch(*decode_plan(made, list(context_lens))).wait()
    return made.session.run_ids.copy()


def test_default_buckets_are_few_and_end_at_the_most_rows() -> None:
    assert (1,) == default_buckets(1)
    assert (1, 4, 16) == default_buckets(16)
    assert (1, 4, 16, 17) == default_buckets(17)
    assert (1, 4, 16, 64, 128, 256, 512, 768, 1000) == default_buckets(1000)


def test_buckets_asked_for_must_be_ones_that_serve() -> None:
    assert (1, 4, 8) == checked_buckets((8, 1, 4, 4), 8)
    for bucket in (0, 9):
        with pytest.raises(ConfigError, match=f"capture_buckets: {bucket} is not within 1 and max_num_seqs, 8"):
            checked_buckets((1, bucket), 8)


def test_a_step_takes_the_smallest_bucket_that_holds_it() -> None:
    graphs = BucketGraphs((1, 4, 8), "eager")
    assert [1, 4, 4, 4, 8, None] == [graphs.bucket_for(num_rows) for num_rows in (1, 2, 3, 4, 5, 9)]
    assert BucketGraphs((1, 4), "off").bucket_for(1) is None


def test_ids_start_at_one_and_are_never_used_again() -> None:
    graphs = BucketGraphs((1, 4), "eager")
    assert [(1, True), (2, True), (1, False)] == [graphs.id_of(bucket) for bucket in (4, 1, 4)]
    graphs.forget()
    assert [(3, True), (3, False)] == [graphs.id_of(4), graphs.id_of(4)]
    graphs.give_up(4)
    assert [1, None] == [graphs.bucket_for(1), graphs.bucket_for(2)]


def test_all_buckets_are_captured_at_the_start_largest_first_on_the_final_kv_buffer(host_executor) -> None:
    made = host_executor(capture_buckets=BUCKETS)
    # Measuring has run eagerly, and captured the largest bucket on a KV buffer of its own.
    assert 1 == max(made.session.run_ids)
    made.session.run_ids.clear()
    made.executor.warm_up()
    assert [EAGER, EAGER, 2, 3, 4] == made.session.run_ids
    assert [[2], [3], [4], [2], [EAGER]] == [
        run_ids(made, *lens) for lens in ((5, 6, 7), (70, 8), (9,), (1, 2, 3, 130), (1, 2, 3, 4, 5))
    ]


def test_lazy_capture_waits_until_a_bucket_is_needed(host_executor) -> None:
    made = host_executor(capture_buckets=BUCKETS, capture="lazy")
    made.session.run_ids.clear()
    made.executor.warm_up()
    assert [EAGER, EAGER] == made.session.run_ids
    assert [[2], [2], [3]] == [run_ids(made, *lens) for lens in ((5, 6), (7, 8), (9,))]


def test_without_capture_every_step_is_eager(host_executor) -> None:
    made = host_executor(capture="off")
    made.executor.warm_up()
    assert {EAGER} == {*made.session.run_ids, *run_ids(made, 5), *run_ids(made, 5, 70)}


def test_a_bucket_that_cannot_be_captured_runs_in_the_next_one_or_eagerly(host_executor) -> None:
    made = host_executor(capture_buckets=BUCKETS, capture="lazy")
    expected = [made.executor.dispatch(*decode_plan(made, lens)).wait().token_ids for lens in ([5, 6], [1, 2, 3])]
    other = host_executor(capture_buckets=BUCKETS, capture="lazy")
    other.session.broken_captures = {2, 4}
    # Id 2 is the bucket of 2, which fails; its step runs eagerly and the bucket of 4 takes its place, under id 3.
    found = [other.executor.dispatch(*decode_plan(other, lens)).wait().token_ids for lens in ([5, 6], [1, 2, 3])]
    assert [tokens.tolist() for tokens in expected] == [tokens.tolist() for tokens in found]
    assert [2, EAGER, 3] == other.session.run_ids[-3:]
    assert [3] == run_ids(other, 5, 6)


def test_only_what_was_captured_is_logged_and_what_failed_is_not_tried_again(host_executor) -> None:
    """Id 1 is the largest bucket, 4, when measuring; id 3 the bucket of 2 and 4 that of 1 at the start."""
    with capture_logs() as logs:
        made = host_executor(capture_buckets=BUCKETS, of_session={"broken_captures": {1, 4}})
        made.executor.warm_up()
    assert [1, 2, 3, 4] == [each for each in made.session.run_ids if each != EAGER]
    assert [4, 1] == [each["bucket"] for each in logs if each["event"] == "cuda.capture_failed"]
    captured = [each for each in logs if each["event"] == "cuda.captured"]
    assert [(2, 1, 2)] == [(each["bucket"], each["num_captured"], each["num_buckets"]) for each in captured]
    assert [[3], [EAGER]] == [run_ids(made, *lens) for lens in ((5, 6), (1, 2, 3))]


def test_memory_is_kept_for_the_graphs_that_can_be_captured(host_executor) -> None:
    """Two buckets of three are left, each of whose graphs takes 1,000 bytes."""
    with capture_logs() as logs:
        host_executor(capture_buckets=BUCKETS, of_session={"broken_captures": {1}, "graph_bytes": 1000})
    assert [2000] == [each["reserved_bytes"] for each in logs if each["event"] == "cuda.memory"]


def test_steps_of_several_proportions_are_measured_the_largest_first(host_executor) -> None:
    """At most 48 tokens, 6 rows and 256 tokens a row. What is left of the device at last is for other proportions."""
    made = host_executor(capture="off", kv_memory="1.0")
    log = list(made.kernels.take_log())
    tokens = [launch.grid[0] for launch in log if launch.name == "rope_kv_write"][::2]  # of two layers
    sampled = [launch.grid[0] for launch in log if launch.name == "sample_draw"]
    assert [(1, 1), (48, 1), (48, 6), (24, 1), (24, 6), (6, 6)] == list(zip(tokens, sampled, strict=True))
    block_bytes = made.executor.layout.total_bytes // made.executor.layout.num_blocks
    free_before_kv = made.device.free_bytes() + made.executor.layout.total_bytes
    assert free_before_kv // 64 <= made.device.free_bytes() < free_before_kv // 64 + block_bytes + 64


def test_half_of_an_odd_step_is_the_larger_one_and_rows_bound_its_sequences() -> None:
    limits = ExecutorLimits(num_blocks=9, block_size=16, max_num_seqs=8, max_num_batched_tokens=7, max_model_len=5)
    assert [(7, 2), (7, 7), (4, 1), (4, 4)] == chunk_shapes(limits)
    assert [4, 3] == null_chunks(7, 2, 16).context_lens.tolist()


def test_a_replay_that_fails_is_a_failed_step(host_executor) -> None:
    made = host_executor(capture_buckets=BUCKETS, capture="lazy")
    run_ids(made, 5)
    made.device.broken = {"replay"}
    with pytest.raises(ExecutorError, match="replay failed: CUDA error 700"):
        run_ids(made, 5)
    assert [2] == made.session.run_ids


def test_another_kv_buffer_means_other_graphs(host_executor) -> None:
    made = host_executor(capture_buckets=BUCKETS)
    made.executor.warm_up()
    tokens = made.executor.dispatch(*decode_plan(made, [5, 9])).wait().token_ids
    kv = DeviceKv(made.device, made.executor.layout)
    made.executor._runner.bind_kv(kv)
    assert [5] == run_ids(made, 5, 9)
    assert tokens.tolist() == made.executor.dispatch(*decode_plan(made, [5, 9])).wait().token_ids.tolist()
    assert not any(address in kv.addresses for address in made.executor._kv.addresses)
    kv.close()


@pytest.mark.parametrize("deterministic", ["off", "on"])
def test_replays_launch_the_same_whatever_the_lengths_and_the_block_tables(host_executor, deterministic: str) -> None:
    """Byte for byte: kernels, grids, blocks, shared bytes and arguments of two steps in one bucket."""
    made = host_executor(capture_buckets=BUCKETS, deterministic=deterministic)
    made.executor.warm_up()
    logs = []
    for lens in ([5, 250, 64], [131, 1, 2, 65]):
        made.kernels.log.clear()
        run_ids(made, *lens)
        launches = made.kernels.take_log()
        logs.append([(*launch[:4], fixed_arguments(launch.name, launch.arguments)) for launch in launches])
    assert len(logs[0]) == 2 * 3 + 3, "rotation, decode and combine, of two layers; sampling"
    assert logs[0] == logs[1]


def test_padding_writes_no_kv(host_executor) -> None:
    """Three rows in a bucket of four: of the KV buffer, only the slots of the three change."""
    made = host_executor(capture_buckets=(4,))
    made.executor.warm_up()
    lengths = [17, 20, 33]
    run_ids(made, *lengths)
    layout = made.executor.layout
    _, batch = decode_plan(made, lengths)
    expected = [[batch.block_table[row, (length - 1) // 16], (length - 1) % 16] for row, length in enumerate(lengths)]
    for address in made.executor._kv.addresses:
        kv = made.device.bytes_at(address, layout.layer_bytes).view(np.float16).reshape(layout.layer_shape)
        assert sorted(expected) == np.argwhere(kv[:, 0].any(axis=(1, 3))).tolist()


def test_padding_reads_no_kv(host_executor) -> None:
    """The fourth row had a long context in the step before."""
    made = host_executor(capture_buckets=(4,))
    made.executor.warm_up()
    run_ids(made, 100, 100, 100, 100)
    run_ids(made, 17, 20, 33)
    _, planner = made.executor._runner.decode._stagings[-1]  # what was staged last
    plan = planner.sections
    assert {0, 1, 2} == set(plan.decode_items[: plan.range_begin[-1], 0].tolist())


def test_whole_texts_are_the_same_with_and_without_graphs(host_executor) -> None:
    asked = requests(replace(SamplingParams(max_tokens=6, temperature=0.0), ignore_eos=True))
    options = {"deterministic": "on"}
    with_graphs = host_executor(capture_buckets=(1, 4), **options)
    without = host_executor(capture="off", **options)
    assert run_requests(without.executor, asked).tokens == run_requests(with_graphs.executor, asked).tokens
    assert max(with_graphs.session.run_ids) > 1
