"""KV blocks that go to host memory and come back: the copies, and that tokens stay the same."""

from dataclasses import replace

import numpy as np
import pytest

from service.core.plan import NO_COPIES, StepPlan
from service.core.types import Request
from service.errors import ConfigError, ExecutorError
from service.executor.cuda.executor import CudaExecutor
from service.executor.cuda.host_kv import HostKv, create_host_kv
from service.executor.cuda.memory import DeviceKv, PinnedBuffer
from service.executor.kv_layout import KvDtype, KvLayout
from tests.cuda.conftest import CONFIG, HEAD_DIM
from tests.cuda.gpu_check import host_kv as gpu_check_host_kv
from tests.cuda.host_device import HostDevice
from tests.cuda.host_executor import HostExecutor
from tests.cuda.numpy_kernels import NumpyKernels
from tests.cuda.simulated_kernels import SimulatedKernels
from tests.cuda.test_executor import GREEDY, requests
from tests.cudasim.build import missing_tool
from tests.stepping import run_requests, scheduler_for

LAYOUT = KvLayout(KvDtype.FLOAT16, num_layers=2, num_blocks=12, num_kv_heads=2, block_size=16, head_dim=8)
BLOCK_BYTES = LAYOUT.layer_bytes // LAYOUT.num_blocks
EMPTY = StepPlan(0, *(np.empty(0, kind) for kind in (np.int32, np.int32, np.bool_)), 0, 0)


def plan_of(*, offload: list[list[int]] | None = None, restore: list[list[int]] | None = None) -> StepPlan:
    copies = [np.array(pairs, np.int32) if pairs else NO_COPIES for pairs in (offload, restore)]
    return replace(EMPTY, offload=copies[0], restore=copies[1])


def block_bytes(device: HostDevice, kv: DeviceKv, layer: int, block: int) -> np.ndarray:
    return device.bytes_at(kv.addresses[layer] + block * BLOCK_BYTES, BLOCK_BYTES)


def fill(device: HostDevice, kv: DeviceKv) -> None:
    """Byte i of block b of layer l is 40 l + b + i mod 7."""
    for layer in range(2):
        for block in range(12):
            block_bytes(device, kv, layer, block)[:] = 40 * layer + block + np.arange(BLOCK_BYTES) % 7


def test_blocks_go_out_before_they_are_overwritten_and_come_back_whole() -> None:
    """Two runs and a single block out; the same plan brings other blocks to where they were."""
    device = HostDevice(0)
    kv = DeviceKv(device, LAYOUT)
    host = HostKv(device, kv, 9)
    device.wait()
    fill(device, kv)
    host.copy(plan_of(offload=[[1, 0], [2, 1], [3, 2]]))
    device.events.clear()
    device.num_pieces = 0
    host.copy(plan_of(offload=[[7, 3], [4, 6], [8, 4], [5, 7], [11, 5]], restore=[[0, 7], [1, 8], [2, 4]]))
    assert (device.events, device.num_pieces) == (["copy_pieces"] * 2, 2 * 3 + 2 * 2), "a call for each way"
    host.copy(plan_of(restore=[[3, 9], [6, 1], [7, 2], [5, 3], [4, 10]]))
    device.wait()
    for layer in range(2):
        found = [int(block_bytes(device, kv, layer, block)[0]) - 40 * layer for block in range(12)]
        assert found == [0, 4, 5, 11, 3, 5, 6, 1, 2, 7, 8, 11]
        assert all((np.diff(block_bytes(device, kv, layer, block)[:7].astype(int)) == 1).all() for block in range(12))
    host.close()
    kv.close()
    assert device.num_buffers == 0


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(12, 9), (2, 1), (200, 300)])
def test_measuring_leaves_the_kv_buffer_as_it_was(num_blocks: int, num_host_blocks: int) -> None:
    device = HostDevice(0)
    kv = DeviceKv(device, replace(LAYOUT, num_blocks=num_blocks))
    host = HostKv(device, kv, num_host_blocks)
    assert host.measure_block_ns() > 0
    assert max(device.bytes_at(address, kv.layout.layer_bytes).max() for address in kv.addresses) == 0
    num_copies = min(num_blocks // 2, (num_host_blocks + 1) // 2, 64)
    assert device.num_pieces == 2 * 3 * 2 * num_copies, "no two of them make a run"
    host.close()
    kv.close()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("100", "host_kv_memory: 100 bytes are too few: a block of 16 tokens takes 2,048"),
        ("900TiB", "host_kv_memory: '900TiB' is more than the"),
        ("much", "host_kv_memory: 'much'"),
        ("1MiB", "host_kv_memory: 1,048,576 bytes of memory are not free"),
    ],
)
def test_memory_that_cannot_be_had_is_told_by_name(memory: str, message: str) -> None:
    device = HostDevice(0)
    kv = DeviceKv(device, LAYOUT)
    device.refused_allocation = device.num_allocations
    with pytest.raises(ConfigError, match=message):
        create_host_kv(device, kv, memory)
    kv.close()
    assert device.num_buffers == 0


def conversations(num_turns: int) -> list[Request]:
    """Three that take turns: each prompt is what its conversation has had, and 21 tokens more."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(3, 256, 21 * num_turns).astype(np.int32) for _ in range(3)]
    sampling = replace(GREEDY, max_tokens=4)
    return [
        Request(3 * turn + number, text[: 21 * (turn + 1)], replace(sampling, seed=number), cache_root=b"%d" % number)
        for turn in range(num_turns)
        for number, text in enumerate(texts)
    ]


def serve_one_by_one(executor: CudaExecutor, asked: list[Request], **changes: int) -> tuple[dict[int, list[int]], int]:
    """Tokens by request, and how many blocks were restored."""
    num_blocks = 10  # nine hold the longest conversation, and nothing beside it
    scheduler = scheduler_for(executor, **{"num_blocks": num_blocks, **changes})
    tokens: dict[int, list[int]] = {}
    for request in asked:
        scheduler.add(request)
        tokens[request.seq_id] = []
        while (plan := scheduler.plan(0)) is not None:
            delta = scheduler.commit(plan, executor.dispatch(plan, scheduler.batch).wait())
            for seq_id, token_id in zip(delta.seq_ids.tolist(), delta.token_ids.tolist(), strict=True):
                tokens[seq_id].append(token_id)
    return tokens, scheduler.counters.totals.num_restored_blocks


def test_tokens_are_the_same_with_and_without_host_memory(host_executor) -> None:
    asked = conversations(6)
    expected, none = serve_one_by_one(host_executor(deterministic="on").executor, asked, prefix_cache=False)
    made = host_executor(deterministic="on", host_kv_memory="512KiB")
    assert made.executor.limits.num_host_blocks == 32
    found, num_restored = serve_one_by_one(made.executor, asked)
    assert (none, num_restored > 30) == (0, True)
    assert expected == found


@pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
def test_the_real_kernels_read_restored_blocks_as_those_they_wrote(host_executor) -> None:
    """On the simulator, with a KV buffer that holds one conversation of three."""
    kernels, asked = SimulatedKernels(HEAD_DIM, block_size=16), conversations(4)
    expected, _ = serve_one_by_one(host_executor(kernels, deterministic="on").executor, asked, prefix_cache=False)
    again = SimulatedKernels(HEAD_DIM, block_size=16)
    executor = host_executor(again, deterministic="on", host_kv_memory="512KiB").executor
    found, num_restored = serve_one_by_one(executor, asked)
    assert num_restored > 10
    assert expected == found


def test_preempted_sequences_resume_from_host_memory_with_the_same_tokens(host_executor) -> None:
    asked = requests(replace(GREEDY, max_tokens=40), (60, 60, 60))
    executor = host_executor(deterministic="on", host_kv_memory="512KiB").executor
    expected, crowded = run_requests(executor, asked), run_requests(executor, asked, num_blocks=16)
    assert (0, 0) == (expected.num_preemptions, expected.num_restored_blocks)
    assert crowded.num_preemptions > 0
    assert crowded.num_restored_blocks > 0
    assert expected.tokens == crowded.tokens


def test_a_copy_that_fails_is_a_failed_step_and_leaves_nothing_in_flight(host_executor) -> None:
    made = host_executor(host_kv_memory="512KiB")
    made.device.broken.add("copy_pieces")
    with pytest.raises(ExecutorError, match="copy_pieces failed"):
        made.executor.dispatch(plan_of(offload=[[1, 0]]), None)
    assert made.device.events[-1] == "wait"
    made.device.broken.clear()
    asked = requests(GREEDY, (17,))
    assert len(run_requests(made.executor, asked).tokens[0]) == 8


@pytest.mark.parametrize("fault", ["copy", "allocation"])
def test_an_executor_without_its_host_memory_leaves_no_buffer(tiny_float16, host_executor, fault: str) -> None:
    kernels = NumpyKernels(HEAD_DIM, 16)
    device = HostDevice(kernels.launch_address)
    if fault == "allocation":  # the last one is the host's
        device.refused_allocation = host_executor().device.num_allocations
    else:
        break_second_copy(device)
    config = replace(CONFIG, model_dir=tiny_float16, host_kv_memory="512KiB")
    with pytest.raises((ConfigError, ExecutorError), match=r"host_kv_memory: 524,288 bytes|copy_pieces failed"):
        HostExecutor.create(config, kernels, device)
    assert device.num_buffers == 0


def break_second_copy(device: HostDevice) -> None:
    """Let the second copy from the device fail once the host's KV memory is there; the first one is enqueued then."""
    copy_pieces = device.copy_pieces

    def copy_once(*pieces: np.ndarray) -> None:
        copy_pieces(*pieces)
        device.broken.add("copy_pieces")

    device.copy_pieces = copy_once


@pytest.mark.parametrize("num_damaged_copies", [0, 1])
def test_the_gpu_check_counts_blocks_that_came_back_damaged(num_damaged_copies: int) -> None:
    """The first copy out, of one layer of one block or of a few in a row, is of the bytes beside it."""
    device = HostDevice(0)
    copy_pieces, calls = device.copy_pieces, []

    def copy_beside(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        if not calls and num_damaged_copies:
            sources[0] -= 1
        calls.append(len(sizes))
        copy_pieces(targets, sources, sizes)

    device.copy_pieces = copy_beside
    kv = DeviceKv(device, LAYOUT)
    host, staged = HostKv(device, kv, 11), PinnedBuffer(device, LAYOUT.layer_bytes)
    num_wrong = gpu_check_host_kv.num_damaged(device, kv, host, staged)
    assert (num_damaged_copies > 0) == (num_wrong > 0)
    for owned in (staged, host, kv):
        owned.close()
