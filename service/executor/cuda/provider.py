"""Whether ONNX Runtime's provider of a device starts, apart from any model, and why not.

A session tells it badly: without the provider, nodes that a CPU lacks are what it names, or it prints and goes on.
"""

import re
from typing import Final

import onnxruntime as ort
from onnx import TensorProto, helper

from service.errors import ConfigError
from service.executor.cuda.device import Device, Provider

_CUDA_FAILURE: Final = re.compile(r"CUDA failure \d+: [^;]+")


def why_not_started(device: Device, preload_said: str) -> ConfigError | None:
    """Why the device's first provider does not start, asked of a graph that any provider runs; None: it does.

    `preload_said` is what loading the device's libraries complained about.
    """
    options, providers = ort.SessionOptions(), device.providers(captures=False)
    options.log_severity_level = 4  # failures reach us as exceptions
    name = provider_name(providers[0])
    reason = f" ({preload_said})" if preload_said else ""
    reason += "; the CUDA libraries that it needs come with the package's extra, chairlift[cuda]"
    try:
        session = ort.InferenceSession(_one_node(), options, providers=providers, enable_fallback=0)
        if session.get_providers()[0] == name:
            return None
    except Exception as error:  # ONNX Runtime's exceptions share no base but this
        failure = _CUDA_FAILURE.search(str(error))
        reason = f": {failure[0].strip() if failure else error}"
    return ConfigError(f"device: {device.memory_name} cannot be used: ONNX Runtime's {name} does not start{reason}")


def provider_name(provider: Provider) -> str:
    """Without its options."""
    return provider if isinstance(provider, str) else provider[0]


def _one_node() -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "one_node", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content
