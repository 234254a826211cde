"""How fast ONNX Runtime multiplies matrices here: what the rest of a forward pass can reach."""

from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from tests.cuda.gpu_check.attention_step import bf16
from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError
from tests.cuda.gpu_check.ort_session import memory_name, open_session
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import Timing, time_calls

MATRIX = {"sim": 64, "cuda": 8192}
SCALARS = {"bf16": TensorProto.BFLOAT16, "half": TensorProto.FLOAT16}


def matmul(device: CheckDevice) -> Iterator[Row]:
    """Two operations a multiplication and an addition."""
    size, errors = MATRIX[device.name], []
    for scalar in SCALARS if device.name == "cuda" else ("half",):
        try:
            timing = time_matmul(device, scalar, size)
        except NotRunError:
            raise
        except Exception as error:  # what ONNX Runtime raises; the other type may still run
            errors.append(f"{scalar}: {error}")
            continue
        speed = round(2 * size**3 / timing.best / 1e12, 1)
        yield {"product": f"{size}^3 {scalar}", **timing.cells(), "TFLOP/s": speed}
    if errors:
        raise StepFailedError("; ".join(errors))


def time_matmul(device: CheckDevice, scalar: str, size: int) -> Timing:
    """A product of square matrices in ONNX Runtime, on the device's stream."""
    session, memory = open_session(device, matmul_model(SCALARS[scalar], size)), memory_name(device)
    values = random_matrix(scalar, size)
    addresses = [device.upload(values), device.upload(values), device.allocate(values.nbytes)]
    binding = session.io_binding()
    for name, address in zip(("a", "b"), addresses, strict=False):
        binding.bind_input(name, memory, 0, SCALARS[scalar], (size, size), address)
    binding.bind_output("c", memory, 0, SCALARS[scalar], (size, size), addresses[2])
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    try:
        return time_calls(device, lambda _: session.run_with_iobinding(binding, run_options), 2)
    finally:
        device.wait()
        for address in addresses:
            device.free(address)


def random_matrix(scalar: str, size: int) -> np.ndarray:
    """Of a variance of 1, as torch's is that the rate stands beside; bfloat16 as its bits."""
    values = np.random.default_rng(1).standard_normal((size, size), np.float32)
    return bf16(values) if scalar == "bf16" else values.astype(np.float16)


def matmul_model(element_type: int, size: int) -> bytes:
    shape = (size, size)
    values = [helper.make_tensor_value_info(name, element_type, shape) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "matmul", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()
