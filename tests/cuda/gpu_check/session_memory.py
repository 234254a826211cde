"""What sessions of both graphs take of the device: one, two with own weights, two that share device tensors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import onnxruntime as ort
from onnx import external_data_helper, numpy_helper

from graphs.manifest import DECODE_NAME, PREFILL_NAME, Manifest
from service.executor.bound_session import session_options
from service.executor.cuda.assembly import preload_cuda_libraries
from service.executor.cuda.graph import cuda_graph
from service.executor.cuda.precision import Precision
from service.executor.cuda.probe import CUDA_PROVIDER
from service.executor.op_library import OpLibrary
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.model_times import SPECS
from tests.cuda.gpu_check.ort_session import memory_name, need_provider
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.shaped_model import write_model
from tests.cuda.host_device import HostDevice

Shared = dict[str, ort.OrtValue]
"""Device tensors by where their bytes lie in the weights."""


def session_memory(device: CheckDevice) -> Iterator[Row]:
    """Loaded, not run. That sharing does not load is told and no failure: the product has one session."""
    need_provider(device)
    preload_cuda_libraries()
    with TemporaryDirectory() as folder:
        model_dir = write_model(SPECS[device.name][0], Path(folder))
        weights_mib = sum(file.stat().st_size for file in model_dir.glob("*.bin")) / 2**20
        models = read_graphs(device, model_dir)
        open_session(device, models[0], model_dir, {})  # what a first session takes for good is no session's
        yield _row(device, "one", models[:1], model_dir, None) | {"weights MiB": round(weights_mib, 1)}
        yield _row(device, "two, each with its weights", models, model_dir, None)
        try:
            yield _row(device, "two that share device tensors", models, model_dir, {})
        except StepFailedError:
            raise
        except Exception as error:  # whatever ONNX Runtime raises
            yield {"sessions": "two that share device tensors", "said": str(error).strip().splitlines()[0][:300]}


def read_graphs(device: CheckDevice, model_dir: Path) -> list[onnx.ModelProto]:
    """As the product loads them."""
    manifest = Manifest.load(model_dir)
    precision = Precision.choose("auto", manifest)
    domain = "chairlift" if device.name == "cuda" else HostDevice.op_domain
    contents = [
        cuda_graph(model_dir / name, manifest.model, domain, precision).content for name in (PREFILL_NAME, DECODE_NAME)
    ]
    return [onnx.load_from_string(content) for content in contents]


def _row(
    device: CheckDevice, name: str, models: Sequence[onnx.ModelProto], model_dir: Path, shared: Shared | None
) -> Row:
    device.wait()
    before = device.free_bytes()
    sessions = [open_session(device, model, model_dir, shared) for model in models]
    taken = before - device.free_bytes()
    del sessions
    return {"sessions": name, "MiB": round(taken / 2**20, 1)}


def open_session(
    device: CheckDevice, model: onnx.ModelProto, model_dir: Path, shared: Shared | None
) -> ort.InferenceSession:
    """With `shared`, weights are its tensors, which gets those that it lacks. Raises StepFailedError."""
    options = session_options(OpLibrary().path, 1, "off")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model_dir))
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if shared is not None:
        for tensor in model.graph.initializer:
            if external_data_helper.uses_external_data(tensor):
                options.add_initializer(tensor.name, _shared_value(tensor, model_dir, shared, memory_name(device)))
    is_gpu = device.name == "cuda"
    providers = device.driver.providers(captures=True) if is_gpu else ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=providers, enable_fallback=0)
    if is_gpu and session.get_providers()[0] != CUDA_PROVIDER:
        raise StepFailedError(f"ONNX Runtime's {CUDA_PROVIDER} does not start")
    return session


def _shared_value(tensor: onnx.TensorProto, model_dir: Path, shared: Shared, memory: str) -> ort.OrtValue:
    place = "|".join(sorted(f"{entry.key}={entry.value}" for entry in tensor.external_data))
    if place not in shared:
        loaded = onnx.TensorProto()
        loaded.CopyFrom(tensor)
        external_data_helper.load_external_data_for_tensor(loaded, str(model_dir))
        shared[place] = ort.OrtValue.ortvalue_from_numpy(numpy_helper.to_array(loaded), memory, 0)
    return shared[place]
