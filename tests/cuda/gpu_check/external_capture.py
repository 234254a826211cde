"""An experiment: a forward pass of ONNX Runtime inside a capture that we begin on its stream, not in its own graphs.

Nothing is judged: rows tell what works. Parts of a graph could then be captured, or what lies between two of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import onnxruntime as ort
from cuda.bindings import driver

from service.executor.cuda.driver_calls import driver_call
from service.executor.cuda.executor import CudaExecutor
from service.executor.cuda.runner import NO_PARAMS
from service.executor.cuda.session import EAGER
from tests.cuda.conftest import CONFIG
from tests.cuda.gpu_check.cuda_device import capture_on
from tests.cuda.gpu_check.device import CheckDevice, NotRunError
from tests.cuda.gpu_check.executors import cuda_executor
from tests.cuda.gpu_check.model_tokens import exported
from tests.cuda.gpu_check.op_graphs import REPLAY, AskedStep, copied_logits, fill_kv, plan_of
from tests.cuda.gpu_check.report import Row

MODES = {
    "thread local": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}  # "global" is what ONNX Runtime's own graphs use
STEPS = (AskedStep("captured", (70, 5), 0, REPLAY), AskedStep("other lengths and blocks", (131, 9), 5, REPLAY))
Replay = Callable[[], object]


def external_capture(device: CheckDevice) -> Iterator[Row]:
    """Every mode, with ONNX Runtime's own graphs allowed besides and not."""
    config = replace(CONFIG, model_dir=exported(device.folder / "tiny", "float16"), capture_buckets=(2,))
    for own, mode in product((False, True), MODES):
        row: Row = {"capture mode": mode, "enable_cuda_graph": own}
        try:
            with cuda_executor(device, replace(config, capture="lazy" if own else "off")) as opened:
                outcome = attempt(device, opened.executor, mode)
        except NotRunError:
            raise
        except Exception as error:  # what ONNX Runtime or the driver says of it is the finding
            outcome = first_cause(error)
        yield row | {"outcome": outcome}


def first_cause(error: BaseException) -> str:
    """Of errors that led to each other, as when an executor cannot be closed after a fault, the first."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:300]}"


def attempt(device: CheckDevice, executor: CudaExecutor, mode: str) -> str:
    """What replays compute on the inputs of either step, beside what ran without a graph."""
    fill_kv(executor)
    runner, expected = executor._runner, []
    for asked in STEPS:
        stage(executor, asked)
        runner._run_decode(None, len(asked.contexts))
        expected.append(copied_logits(executor, len(asked.contexts)))
    stage(executor, STEPS[0])
    executor._device.wait()
    replay = captured(device, executor, mode)
    for asked, logits in zip(STEPS[::-1], expected[::-1], strict=True):
        executor._device.clear(runner.outputs.logits, logits.size)
        stage(executor, asked)
        replay()
        if not np.array_equal(logits, copied_logits(executor, len(asked.contexts))):
            return f"captured, but other logits: {asked.name}"
    return "captured; replays are right"


def stage(executor: CudaExecutor, asked: AskedStep) -> None:
    """Enqueue the copies of a step's inputs."""
    inputs = executor._inputs.fill(*plan_of(asked, executor))
    executor._runner.decode.stage(inputs, NO_PARAMS, None, len(asked.contexts))


def captured(device: CheckDevice, executor: CudaExecutor, mode: str) -> Replay:
    """A function that replays a captured forward pass over what is bound; on the simulator, one that runs it."""
    session, binding = executor._runner._parts.session, executor._runner._bindings[EAGER]
    if device.name == "sim":
        return lambda: session.run(binding, EAGER)
    options, stream = ort.RunOptions(), driver.CUstream(executor._device.stream)
    options.add_run_config_entry("gpu_graph_id", str(EAGER))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    _, executable = capture_on(stream, lambda: session._session.run_with_iobinding(binding.io, options), MODES[mode])
    return lambda: driver_call(driver.cuGraphLaunch, executable, stream)
