"""Our ops in ONNX Runtime's CUDA graphs: what a capture launches, what a replay computes on other lengths and blocks.

The same steps run in two executors over the same keys and values, in one without graphs and in one that captures.
"""

import ctypes
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.executor.cuda.executor import CudaExecutor
from service.executor.cuda.memory import PinnedBuffer
from service.executor.cuda.sample_outputs import LOGIT_BYTES
from tests.cuda.conftest import CONFIG
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.executors import cuda_executor
from tests.cuda.gpu_check.model_tokens import exported
from tests.cuda.gpu_check.report import Row
from tests.cuda.launch_type import LAUNCH_TYPE

MAX_ERROR = 0.01  # of logits, in the 2-norm: a padded product may be summed in another order
BUCKETS = (2, 4)
CHUNK = 40  # tokens
CAPTURE, REPLAY, EAGER = "captures", "replays", "eager"


@dataclass(frozen=True)
class AskedStep:
    """A decode step of sequences of `contexts` tokens, or a chunk of one; `shift` moves the blocks that they have."""

    name: str
    contexts: tuple[int, ...]
    shift: int
    how: str

    @property
    def is_full(self) -> bool:
        """Whether products have the same shapes with and without a graph."""
        return self.how == EAGER or len(self.contexts) in BUCKETS

    def num_launches(self, num_layers: int, *, replays_launch: bool) -> int:
        """Of the host: three kernels a layer, three for sampling; a first run computes twice and is captured."""
        if self.how == EAGER:
            return 2 * num_layers + 3  # rotation and prefill
        once = 3 * num_layers + 3
        return 3 * once if self.how == CAPTURE else once * replays_launch


ORDER = (
    AskedStep("first run of a bucket of 2", (70, 5), 0, CAPTURE),
    AskedStep("replay", (70, 5), 0, REPLAY),
    AskedStep("replay on other blocks", (70, 5), 3, REPLAY),
    AskedStep("replay with other lengths", (131, 9), 5, REPLAY),
    AskedStep("first run of a bucket of 4", (5, 6, 7, 90), 1, CAPTURE),
    AskedStep("replay of the bucket of 2", (33, 64), 2, REPLAY),
    AskedStep("a chunk, without a graph", (CHUNK + 60,), 4, EAGER),
    AskedStep("replay of the bucket of 2 after that", (70, 5), 3, REPLAY),
    AskedStep("replay of the bucket of 4, one row padded", (40, 17, 3), 4, REPLAY),
    AskedStep("replay of the bucket of 4 on other blocks", (64, 128, 1, 17), 6, REPLAY),
)


@dataclass(frozen=True)
class Ran:
    logits: np.ndarray  # [num_rows, vocab_size]
    tokens: list[int]
    num_launches: int


def op_graphs(device: CheckDevice) -> Iterator[Row]:
    config = replace(CONFIG, model_dir=exported(device.folder / "tiny", "float16"), capture_buckets=BUCKETS)
    with cuda_executor(device, replace(config, capture="off")) as opened:
        eager = run_all(opened.executor)
    with cuda_executor(device, replace(config, capture="lazy")) as opened:
        captured = run_all(opened.executor)
        num_layers = opened.executor.layout.num_layers
    faults = []
    for asked, ours, its in zip(ORDER, captured, eager, strict=True):
        row, fault = judged(asked, ours, its, asked.num_launches(num_layers, replays_launch=device.name == "sim"))
        yield row
        faults += [f"{asked.name}: {fault}"] if fault else []
    if faults:
        raise StepFailedError("; ".join(faults))


def judged(asked: AskedStep, ours: Ran, its: Ran, num_launches: int) -> tuple[Row, str]:
    """A row, and what is wrong with it: `ours` beside `its`, which ran without a graph."""
    error = float(np.linalg.norm(ours.logits - its.logits) / np.linalg.norm(its.logits))
    row: Row = {
        "step": asked.name,
        "host launches": ours.num_launches,
        "expected": num_launches,
        "logits off by": f"{error:.1e}",
        "equal bit for bit": bool(np.array_equal(ours.logits, its.logits)),
    }
    faults = [] if error <= MAX_ERROR else ["other logits than without a graph"]
    faults += ["other tokens"] if asked.is_full and error == 0 and ours.tokens != its.tokens else []
    faults += [f"{ours.num_launches} launches, not {num_launches}"] if ours.num_launches != num_launches else []
    return row, ", ".join(faults)


def run_all(executor: CudaExecutor) -> list[Ran]:
    fill_kv(executor)
    found = []
    with counted_launches(executor) as calls:
        for asked in ORDER:
            calls.clear()
            tokens = executor.dispatch(*plan_of(asked, executor)).wait().token_ids.tolist()
            found.append(Ran(copied_logits(executor, len(tokens)), tokens, len(calls)))
    return found


def copied_logits(executor: CudaExecutor, num_rows: int) -> np.ndarray:
    """float64 [num_rows, vocab_size] of what was enqueued last, which is waited for."""
    outputs = executor._runner.outputs
    with closing(PinnedBuffer(executor._device, LOGIT_BYTES * num_rows * outputs.vocab_size)) as staged:
        logits = staged.view((num_rows, outputs.vocab_size), outputs.logit_dtype)
        executor._device.copy_out(logits, outputs.logits)
        executor._device.wait()
        return logits.astype(np.float64)


def fill_kv(executor: CudaExecutor) -> None:
    """Random numbers, the same in every executor of a model."""
    layout, rng = executor.layout, np.random.default_rng(7)
    with closing(PinnedBuffer(executor._device, layout.layer_bytes)) as staged:
        layer = staged.view((layout.layer_bytes // 2,), np.float16)
        for address in executor._kv.addresses:
            layer[:] = rng.standard_normal(layer.shape, np.float32)
            executor._device.copy_in(address, layer)
            executor._device.wait()


def plan_of(asked: AskedStep, executor: CudaExecutor) -> tuple[StepPlan, BatchState]:
    limits, num_rows = executor.limits, len(asked.contexts)
    num_scheduled = CHUNK if asked.how == EAGER else 1
    batch = BatchState(limits.max_num_seqs, limits.max_model_len, limits.block_size)
    batch.num_tokens[:num_rows] = batch.num_prompt_tokens[:num_rows] = asked.contexts
    batch.num_computed_tokens[:num_rows] = np.array(asked.contexts) - num_scheduled
    width = limits.max_model_len // limits.block_size
    for row in range(num_rows):  # no block belongs to two rows
        blocks = (np.arange(width) + row * width + asked.shift) % (limits.num_blocks - 1)
        batch.block_table[row, :width] = 1 + blocks
    rows, scheduled = np.arange(num_rows, dtype=np.int32), np.full(num_rows, num_scheduled, np.int32)
    num_decode_rows = 0 if asked.how == EAGER else num_rows
    return StepPlan(0, rows, scheduled, np.ones(num_rows, np.bool_), num_decode_rows, num_scheduled * num_rows), batch


@contextmanager
def counted_launches(executor: CudaExecutor) -> Iterator[list[int]]:
    """Grows by an entry with every launch that an op makes from the host."""
    steps = (executor._runner._decode_step, executor._runner._mixed_step)
    calls: list[int] = []
    launch = LAUNCH_TYPE(steps[0].launch)

    def count(*arguments: object) -> int:
        calls.append(len(arguments))
        return launch(*arguments)

    counting = LAUNCH_TYPE(count)
    before = [step.launch for step in steps]
    for step in steps:
        step.launch = ctypes.cast(counting, ctypes.c_void_p).value
    try:
        yield calls
    finally:
        for step, address in zip(steps, before, strict=True):
            step.launch = address
