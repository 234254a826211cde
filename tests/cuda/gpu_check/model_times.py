"""What a decode step costs, whole: device, host, in a CUDA graph and without; models of random weights."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from graphs.spec import ModelSpec
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.types import Request, SamplingParams
from service.executor.api import Executor
from service.executor.config import ExecutorConfig
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.executors import cuda_executor
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.shaped_model import shaped_spec, write_model

CAPTURED_GAIN = 1.25  # at batch 1, of the small model
HOST_SHARE = 0.10  # at batch 256, of a step of the large model with all its layers
LARGE_LAYERS = 32  # of an 8B model; fewer are measured
PROMPT_TOKENS = 64
SPECS = {
    "sim": (shaped_spec("tiny", 64, 96, 1, (2, 1, 64), 256),),
    "cuda": (
        shaped_spec("135M-shaped", 576, 1536, 30, (9, 3, 64), 49_152),
        shaped_spec("8B-shaped, 4 layers", 4096, 14_336, 4, (32, 8, 128), 32_000),
    ),
}
BATCHES = {"sim": (2,), "cuda": (1, 16, 256)}
NUM_STEPS = {"sim": 3, "cuda": 40}


@dataclass(frozen=True)
class StepTimes:
    """Medians of decode steps."""

    host_us: float  # planned, dispatched and committed
    wait_us: float

    @property
    def step_us(self) -> float:
        return self.host_us + self.wait_us


def model_times(device: CheckDevice) -> Iterator[Row]:
    """Tokens a second of decode steps, batch over whole step; steps of one batch follow each other."""
    faults = []
    for spec in SPECS[device.name]:
        with TemporaryDirectory() as folder:  # gigabytes, which nobody wants among the results
            model_dir = write_model(spec, Path(folder))
            eager = {batch: times for batch, times, _ in _times(device, model_dir, "off")}
            for batch, times, taken in _times(device, model_dir, "eager"):
                yield _row(spec, batch, eager[batch], times, taken)
                if device.name == "cuda":
                    faults += judge(spec, batch, eager[batch], times)
    if faults:
        raise StepFailedError("; ".join(faults))


def _times(device: CheckDevice, folder: Path, capture: str) -> Iterator[tuple[int, StepTimes, int]]:
    """For each batch; and the bytes that the executor took."""
    batches = BATCHES[device.name]
    config = ExecutorConfig(
        model_dir=folder,
        kv_memory="1MiB" if device.name == "sim" else "4GiB",
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(128, 8 * max(batches)),
        max_model_len=512,
    )
    with cuda_executor(device, replace(config, capture=capture, capture_buckets=batches)) as opened:
        if opened.failed or (capture == "eager" and sorted(opened.captured) != sorted(batches)):
            raise StepFailedError(f"captured {opened.captured} of {batches}: {'; '.join(opened.failed)}")
        for batch in batches:
            yield batch, decode_times(opened.executor, batch, NUM_STEPS[device.name]), opened.reserved_bytes


def decode_times(executor: Executor, batch: int, num_steps: int) -> StepTimes:
    """`batch` sequences under the real scheduler, as soon as all of them decode."""
    limits = executor.limits
    config = SchedulerConfig(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        watermark_fraction=0.0,
    )
    scheduler = Scheduler(config)
    rng = np.random.default_rng(batch)
    sampling = SamplingParams(max_tokens=num_steps + 40, temperature=0.0, ignore_eos=True)
    for seq_id in range(batch):
        scheduler.add(Request(seq_id, rng.integers(3, 256, PROMPT_TOKENS).astype(np.int32), sampling))
    host_ns, wait_ns = [], []
    while len(host_ns) < num_steps:
        started = time.perf_counter_ns()
        plan = scheduler.plan(0)
        assert plan is not None, "sequences end only after the last step that is timed"
        handle = executor.dispatch(plan, scheduler.batch)
        dispatched = time.perf_counter_ns()
        result = handle.wait()
        waited = time.perf_counter_ns()
        is_full = plan.is_decode_only and len(plan.rows) == batch
        scheduler.commit(plan, result)
        if is_full:
            host_ns.append(dispatched - started + time.perf_counter_ns() - waited)
            wait_ns.append(waited - dispatched)
    return StepTimes(median(host_ns) / 1e3, median(wait_ns) / 1e3)


def host_share(spec: ModelSpec, times: StepTimes) -> float:
    """Of a step; of the large model's, had it all its layers: those that were measured wait for the device longer."""
    factor = LARGE_LAYERS / spec.num_layers if spec.hidden_size == 4096 else 1.0
    return times.host_us / (times.host_us + factor * times.wait_us)


def judge(spec: ModelSpec, batch: int, eager: StepTimes, captured: StepTimes) -> list[str]:
    faults = []
    gain = eager.step_us / captured.step_us
    if batch == 1 and spec.hidden_size < 4096 and gain < CAPTURED_GAIN:
        faults.append(f"{spec.name}: graphs are {gain:.2f} times as fast, not {CAPTURED_GAIN}")
    if batch == 256 and spec.hidden_size == 4096 and (share := host_share(spec, captured)) > HOST_SHARE:
        faults.append(f"{spec.name}: the host takes {share:.1%} of a step of {batch}, not {HOST_SHARE:.0%}")
    return faults


def _row(spec: ModelSpec, batch: int, eager: StepTimes, captured: StepTimes, taken: int) -> Row:
    return {
        "model": spec.name,
        "batch": batch,
        "tokens/s, graph": round(1e6 * batch / captured.step_us, 1),
        "tokens/s, eager": round(1e6 * batch / eager.step_us, 1),
        "gain": round(eager.step_us / captured.step_us, 3),
        "step us": round(captured.step_us, 1),
        "host us": round(captured.host_us, 1),
        "host share": f"{host_share(spec, captured):.1%}",
        "MiB": round(taken / 2**20, 1),
    }
