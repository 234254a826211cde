"""What this machine can do at most: bytes that a copy moves and that a kernel reads, and products of matrices."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from service.executor.cuda.assembly import preload_cuda_libraries, quiet_onnxruntime
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import Timing, time_calls, time_graph

READ_ONLY = Path(__file__).with_name("read_only.cu")
READ_THREADS = 512
NUM_BYTES = {"sim": 1 << 18, "cuda": 4 << 30}
MATRIX = {"sim": 64, "cuda": 8192}
BLOCKS_PER_SM = 4  # 2048 threads
SCALARS = {"bf16": TensorProto.BFLOAT16, "half": TensorProto.FLOAT16}


def ceilings(device: CheckDevice) -> Iterator[Row]:
    """The share is of the memory's data sheet."""
    peak = device.peak_bytes_per_s()
    num_bytes = min(NUM_BYTES[device.name], device.free_bytes() // 4)
    for what, measure in (("copy, read + written", copy_rate), ("read only", read_rate)):
        rate = measure(device, num_bytes)
        yield {"ceiling": what, "GB/s": round(rate / 1e9, 1), "of peak": f"{rate / peak:.3f}" if peak else ""}
    errors = []
    for scalar in SCALARS if device.name == "cuda" else ("half",):
        size = MATRIX[device.name]
        try:
            timing = time_matmul(device, scalar, size)
        except Exception as error:  # what ONNX Runtime raises; the other type may still run
            errors.append(f"{scalar}: {error}")
            continue
        yield {
            "ceiling": f"MatMul {size}^3 {scalar}",
            **timing.cells(),
            "TFLOP/s": round(2 * size**3 / timing.best / 1e12, 1),
        }
    if errors:
        raise StepFailedError("; ".join(errors))


def copy_rate(device: CheckDevice, num_bytes: int) -> float:
    """Bytes a second, read and written ones counted."""
    source, target = device.allocate(num_bytes), device.allocate(num_bytes)
    try:
        return 2 * num_bytes / time_graph(device, lambda _: device.copy_within(target, source, num_bytes), 1).best
    finally:
        device.free(source)
        device.free(target)


def read_rate(device: CheckDevice, num_bytes: int) -> float:
    """Bytes a second. Raises StepFailedError if not every word was read."""
    words = np.random.default_rng(2).integers(0, 1 << 32, min(num_bytes, 1 << 20) // 4, np.uint32)
    num_copies = (num_bytes // words.nbytes - 1) | 1  # odd, so that their xor is that of one
    grid = BLOCKS_PER_SM * device.num_sms
    source, out = device.allocate(num_copies * words.nbytes), device.upload(np.zeros(grid * READ_THREADS, np.uint32))
    try:
        device.copy_in(source, words)
        for copy in range(1, num_copies):
            device.copy_within(source + copy * words.nbytes, source, words.nbytes)
        kernel = device.load(READ_ONLY, ()).kernel("read_only")
        arguments = [ctypes.c_void_p(source), ctypes.c_void_p(out), ctypes.c_int64(num_copies * words.size // 4)]
        timing = time_graph(
            device, lambda _: device.launch(kernel, (grid, 1, 1), (READ_THREADS, 1, 1), 0, arguments), 1
        )
        found = np.empty(grid * READ_THREADS, np.uint32)
        device.copy_out(out, found)
    finally:
        device.free(source)
        device.free(out)
    expected = np.bitwise_xor.reduce(words)
    if np.bitwise_xor.reduce(found) != expected:
        raise StepFailedError("the read-only kernel did not read every word once")
    return num_copies * words.nbytes / timing.best


def time_matmul(device: CheckDevice, scalar: str, size: int) -> Timing:
    """A product of square matrices in ONNX Runtime, on the device's stream."""
    model = matmul_model(SCALARS[scalar], size)
    options = ort.SessionOptions()
    memory = "cuda" if device.name == "cuda" else "cpu"
    providers = device.driver.providers(captures=False) if device.name == "cuda" else ["CPUExecutionProvider"]
    with quiet_onnxruntime():
        preload_cuda_libraries()
        session = ort.InferenceSession(model, options, providers=providers)
    if device.name == "cuda" and session.get_providers()[0] != providers[0][0]:
        raise StepFailedError(f"ONNX Runtime's {providers[0][0]} does not start")
    values = (np.random.default_rng(1).standard_normal((size, size)) / size).astype(np.float16)
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


def matmul_model(element_type: int, size: int) -> bytes:
    shape = (size, size)
    values = [helper.make_tensor_value_info(name, element_type, shape) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "matmul", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()
