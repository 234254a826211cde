"""What the GPU check says of our ops in graphs: right replays, stale ones, and captures from outside; on the host."""

from types import SimpleNamespace

import pytest

from service.errors import ExecutorError
from tests.cuda.gpu_check.external_capture import attempt, first_cause
from tests.cuda.gpu_check.op_graphs import BUCKETS, ORDER, judged, run_all

NUM_LAYERS = 2


@pytest.fixture
def faults_of(host_executor):
    """A function from an executor that captures to what is wrong with its steps, by their names."""
    eager = run_all(host_executor(capture="off").executor)

    def faults(made) -> dict[str, str]:
        ran = run_all(made.executor)
        found = {}
        for asked, ours, its in zip(ORDER, ran, eager, strict=True):
            row, fault = judged(asked, ours, its, asked.num_launches(NUM_LAYERS, replays_launch=True))
            assert row["equal bit for bit"] or fault
            found |= {asked.name: fault} if fault else {}
        return found

    return faults


def test_replays_on_host_memory_are_right(host_executor, faults_of):
    assert {} == faults_of(host_executor(capture="lazy", capture_buckets=BUCKETS))


def test_replays_on_stale_block_tables_are_a_fault(host_executor, faults_of):
    """Steps whose table is that of the step before are still right."""
    made = host_executor(capture="lazy", capture_buckets=BUCKETS)
    copy_in_rows, tables = made.device.copy_in_rows, []

    def copy_once(address, stride_bytes, source):
        tables.append(address)
        if len(tables) == 1:
            copy_in_rows(address, stride_bytes, source)

    made.device.copy_in_rows = copy_once
    found = faults_of(made)
    assert {"other logits than without a graph"} == set(found.values())
    assert {"replay on other blocks", "replay with other lengths"} <= found.keys()
    assert not {"first run of a bucket of 2", "replay"} & found.keys()


def test_a_graph_that_was_not_captured_is_a_fault(host_executor, faults_of):
    """Its step runs eagerly: once, where a first run computes three times."""
    found = faults_of(host_executor(capture="lazy", capture_buckets=(4,)))
    assert "9 launches, not 27" == found["first run of a bucket of 4"]


def test_launches_of_the_host_follow_from_layers():
    """Rotation, decode and combine of 30 layers, sampling in three; a chunk needs rotation and prefill."""
    counts = [asked.num_launches(30, replays_launch=False) for asked in ORDER]
    assert [279, 0, 0, 0, 279, 0, 63, 0, 0, 0] == counts


def test_a_capture_from_outside_is_right_if_its_replays_are(host_executor):
    device = SimpleNamespace(name="sim")
    made = host_executor(capture="off")
    assert "captured; replays are right" == attempt(device, made.executor, "relaxed")
    run, runs = made.session.run, []

    def run_at_first(binding, graph_id):
        runs.append(graph_id)
        if len(runs) <= 2:  # those without a graph
            run(binding, graph_id)

    made.session.run = run_at_first
    assert "captured, but other logits: other lengths and blocks" == attempt(device, made.executor, "relaxed")


def test_of_errors_that_led_to_each_other_the_first_is_told():
    try:
        try:
            raise ValueError("operation not permitted\nwhile capturing")
        finally:
            raise ExecutorError("cannot be closed")
    except ExecutorError as error:
        assert "ValueError: operation not permitted" == first_cause(error)
