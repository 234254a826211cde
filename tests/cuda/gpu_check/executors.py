"""CUDA executors of a model folder: on the GPU as the product makes them, on the simulator over host memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from structlog.testing import capture_logs

from graphs.manifest import Manifest
from service.executor.api import Executor
from service.executor.config import ExecutorConfig
from service.executor.cuda.requirements import require_cuda_model
from service.executor.factory import create_executor
from tests.cuda.gpu_check.device import CheckDevice
from tests.cuda.gpu_check.ort_session import need_provider
from tests.cuda.host_executor import HostExecutor
from tests.cuda.simulated_kernels import SimulatedKernels


@dataclass(frozen=True)
class OpenExecutor:
    executor: Executor
    captured: list[int]  # buckets
    failed: list[str]  # of other buckets: why they could not be captured
    reserved_bytes: int  # what it took of the device, KV buffer included
    capture_s: float = 0.0  # of all buckets
    kept_bytes: int = 0  # that it keeps free for graphs and first runs, as it has measured them


@contextmanager
def cuda_executor(device: CheckDevice, config: ExecutorConfig) -> Iterator[OpenExecutor]:
    """Warmed up; closed in the end. Its buckets are told by its own log. Raises NotRunError without a provider."""
    need_provider(device)
    before = device.free_bytes()
    with capture_logs() as events:
        executor = _create(device, config)
        try:
            executor.warm_up()
        except BaseException:
            executor.close()
            raise
    captured = [int(event["bucket"]) for event in events if event["event"] == "cuda.captured"]
    failed = [f"{event['bucket']}: {event['error']}" for event in events if event["event"] == "cuda.capture_failed"]
    capture_s = sum(float(event["took_s"]) for event in events if event["event"] == "cuda.captured")
    kept = next((int(event["reserved_bytes"]) for event in events if event["event"] == "cuda.memory"), 0)
    try:
        yield OpenExecutor(executor, captured, failed, before - device.free_bytes(), capture_s, kept)
    finally:
        executor.close()


def _create(device: CheckDevice, config: ExecutorConfig) -> Executor:
    if device.name == "cuda":
        cache = str(device.folder / "kernels")
        return create_executor(replace(config, device="cuda", kernel_cache=cache))
    manifest = Manifest.load(config.model_dir)
    precision = require_cuda_model(config, manifest)
    kernels = SimulatedKernels(manifest.model.head_dim, config.block_size, precision=precision)
    return HostExecutor.create(config, kernels).executor
