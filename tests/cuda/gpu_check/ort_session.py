"""ONNX Runtime on the device of a step, for graphs of the check's own."""

import onnxruntime as ort

from service.executor.cuda.assembly import preload_cuda_libraries
from service.executor.cuda.probe import CUDA_PROVIDER
from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError


def need_provider(device: CheckDevice) -> None:
    """Raises NotRunError on a GPU that this ONNX Runtime has no provider for."""
    if device.name == "cuda" and CUDA_PROVIDER not in ort.get_available_providers():
        raise NotRunError("this ONNX Runtime has no CUDA provider: install onnxruntime-gpu")


def open_session(device: CheckDevice, model: bytes, *, captures: bool = False) -> ort.InferenceSession:
    """On the device's stream; on the simulator, ONNX Runtime's CPU provider. Raises NotRunError, StepFailedError."""
    need_provider(device)
    is_gpu = device.name == "cuda"
    providers = device.driver.providers(captures=captures) if is_gpu else ["CPUExecutionProvider"]
    said = preload_cuda_libraries()
    # What it logs is kept if the step fails; with its fallback it would go on with the CPU.
    session = ort.InferenceSession(model, providers=providers, enable_fallback=0)
    if is_gpu and session.get_providers()[0] != CUDA_PROVIDER:
        raise StepFailedError(f"ONNX Runtime's {CUDA_PROVIDER} does not start: {said or 'see what the step printed'}")
    return session


def memory_name(device: CheckDevice) -> str:
    return "cuda" if device.name == "cuda" else "cpu"
