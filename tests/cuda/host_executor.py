"""A CUDA executor on host memory, with CUDA graphs as a session sees them."""

from dataclasses import dataclass, replace
from typing import Any

from graphs.manifest import PREFILL_NAME, Manifest
from service.errors import ExecutorError
from service.executor.config import ExecutorConfig
from service.executor.cuda.executor import CudaExecutor, CudaParts
from service.executor.cuda.graph import cuda_graph
from service.executor.cuda.kernels import Scalar
from service.executor.cuda.requirements import require_cuda_model
from service.executor.cuda.row_edits import SamplingBounds
from service.executor.cuda.session import EAGER, OrtBinding, OrtSession
from service.executor.op_library import OpLibrary
from tests.cuda.bfloat16_graph import computed_in_float32
from tests.cuda.host_device import HostDevice


class GraphSession:
    """A session that treats graph ids as ONNX Runtime's CUDA provider does, on any provider.

    The first run of an id computes three times and keeps its binding; later ones are enqueued and compute with that
    binding, whatever they were given. Runs are logged as ids. Ids in `broken_captures` fail. A graph takes
    `graph_bytes` of the device.
    """

    def __init__(self, session: OrtSession, device: HostDevice) -> None:
        self._session = session
        self._device = device
        self.sliding_window = session.sliding_window
        self.run_ids: list[int] = []
        self.captured: dict[int, OrtBinding] = {}
        self.broken_captures: set[int] = set()
        self.graph_bytes = 0
        self.is_closed = False

    def new_binding(self) -> OrtBinding:
        return self._session.new_binding()

    def run(self, binding: OrtBinding, graph_id: int) -> None:
        self.run_ids.append(graph_id)
        if graph_id in self.captured:
            self._device.enqueue("replay", lambda: self._session.run(self.captured[graph_id], EAGER))
            return
        if graph_id in self.broken_captures:
            raise ExecutorError("a forward pass failed: CUDA error 900")
        for _ in range(1 if graph_id == EAGER else 3):
            self._device.enqueue("run", lambda: self._session.run(binding, EAGER))
        self._device.drain()
        if graph_id != EAGER:
            self.captured[graph_id] = binding
            self._device.num_hidden_bytes += self.graph_bytes

    def close(self) -> None:
        self.is_closed = True
        self._session.close()


@dataclass
class HostExecutor:
    """The executor and what it was made of."""

    executor: CudaExecutor
    device: HostDevice
    session: GraphSession
    kernels: Any  # with `launch_address`, `kernels`, `errors` and `take_log`

    @classmethod
    def create(
        cls,
        config: ExecutorConfig,
        kernels: Any,
        device: HostDevice | None = None,
        bounds: SamplingBounds | None = None,
        **of_session: object,
    ) -> "HostExecutor":
        manifest = Manifest.load(config.model_dir)
        library = OpLibrary()
        device = device or HostDevice(kernels.launch_address)
        precision = require_cuda_model(config, manifest)
        graph = cuda_graph(config.model_dir / PREFILL_NAME, manifest.model, device.op_domain, precision)
        if precision.scalar is Scalar.BF16:
            graph = replace(graph, content=computed_in_float32(graph.content, device.op_domain))
        session = GraphSession(OrtSession.load(config.model_dir, graph, library.path, device, captures=True), device)
        for name, value in of_session.items():
            setattr(session, name, value)
        parts = CudaParts(device, session, kernels.kernels, library, kernels.close, bounds or SamplingBounds())
        executor = CudaExecutor(config, manifest, parts)
        return cls(executor, device, session, kernels)
