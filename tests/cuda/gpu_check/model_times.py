"""What a decode step costs, whole: device, host, in a CUDA graph and without; models of random weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from graphs.spec import ModelSpec
from service.executor.config import ExecutorConfig
from tests.cuda.gpu_check.decode_steps import StepTimes, time_steps
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.executors import OpenExecutor, cuda_executor
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.shaped_model import shaped_spec, write_model

CAPTURED_GAIN = 1.25  # at batch 1, of the small model
HOST_SHARE = 0.10  # at batch 256, of a step of the large model with all its layers
LARGE_LAYERS = 32  # of an 8B model; fewer are measured
SPECS = {
    "sim": (shaped_spec("tiny", 64, 96, 1, (2, 1, 64), 256),),
    "cuda": (
        shaped_spec("135M-shaped", 576, 1536, 30, (9, 3, 64), 49_152),
        shaped_spec("8B-shaped, 4 layers", 4096, 14_336, 4, (32, 8, 128), 32_000),
    ),
}
BATCHES = {"sim": (2,), "cuda": (1, 16, 256)}
NUM_STEPS = {"sim": 3, "cuda": 40}


def model_times(device: CheckDevice) -> Iterator[Row]:
    """Tokens a second of decode steps, batch over whole step; steps of one batch follow each other."""
    faults = []
    for spec in SPECS[device.name]:
        with TemporaryDirectory() as folder:  # gigabytes, which nobody wants among the results
            model_dir = write_model(spec, Path(folder))
            eager = {batch: times for batch, times, _ in _times(device, model_dir, "off")}
            for batch, times, opened in _times(device, model_dir, "eager"):
                yield _row(spec, batch, eager[batch], times) | {
                    "MiB": round(opened.reserved_bytes / 2**20, 1),
                    "kept free MiB": round(opened.kept_bytes / 2**20, 1),
                    "capture s": round(opened.capture_s, 2),
                }
                if device.name == "cuda":
                    faults += judge(spec, batch, eager[batch], times)
    if faults:
        raise StepFailedError("; ".join(faults))


def _times(device: CheckDevice, folder: Path, capture: str) -> Iterator[tuple[int, StepTimes, OpenExecutor]]:
    """For each batch; and what was timed."""
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
            yield batch, time_steps(opened.executor, batch, NUM_STEPS[device.name]), opened


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


def _row(spec: ModelSpec, batch: int, eager: StepTimes, captured: StepTimes) -> Row:
    return {
        "model": spec.name,
        "batch": batch,
        "tokens/s, graph": round(1e6 * batch / captured.step_us, 1),
        "tokens/s, eager": round(1e6 * batch / eager.step_us, 1),
        "gain": round(eager.step_us / captured.step_us, 3),
        "step us": round(captured.step_us, 1),
        "host us": round(captured.host_us, 1),
        "host share": f"{host_share(spec, captured):.1%}",
        "step us, ahead": "" if captured.ahead_us is None else round(captured.ahead_us, 1),
    }
