"""A CUDA executor on host memory, with CUDA graphs as a session sees them."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from graphs.manifest import PREFILL_NAME, Manifest
from service.errors import ExecutorError
from service.executor.config import ExecutorConfig
from service.executor.cuda.executor import CudaExecutor, CudaParts
from service.executor.cuda.graph import cuda_graph
from service.executor.cuda.kernels import Scalar
from service.executor.cuda.launch import CudaStep
from service.executor.cuda.requirements import require_cuda_model
from service.executor.cuda.row_edits import SamplingBounds
from service.executor.cuda.session import EAGER, OrtBinding, OrtSession
from service.executor.op_library import OpLibrary
from tests.cuda.bfloat16_graph import computed_in_float32
from tests.cuda.host_device import HostDevice


class UsedStep:
    """`chairlift_cuda_use`, and what it was called with last."""

    def __init__(self, use: Any) -> None:
        self._use = use
        self._use.argtypes, self._use.restype = [ctypes.c_void_p], ctypes.c_int
        self.address: int | None = None

    def __call__(self, address: int | None) -> int:
        self.address = address
        return int(self._use(address))

    def copy(self) -> CudaStep:
        """What ops launch by now."""
        assert self.address is not None, "no step is in use"
        return CudaStep.from_buffer_copy(CudaStep.from_address(self.address))


class LateBinding:
    """Keeps what is bound, for the runs that are enqueued with it."""

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self._bound: dict[str, tuple[str, tuple[Any, ...]]] = {}

    def bind_input(self, name: str, *tensor: Any) -> None:
        self._bound[name] = ("bind_input", tensor)

    def bind_output(self, name: str, *tensor: Any) -> None:
        self._bound[name] = ("bind_output", tensor)

    def copy(self) -> OrtBinding:
        binding = self._session.new_binding()
        for name, (method, tensor) in self._bound.items():
            getattr(binding, method)(name, *tensor)
        return binding


class GraphSession:
    """A session that treats graph ids as ONNX Runtime's CUDA provider does, on any provider.

    Runs are enqueued with what is bound and in use as they are: the first run of an id computes three times and is
    waited for, later ones compute the same again, whatever they were given. Runs are logged as ids. Ids in
    `broken_captures` fail. A graph takes `graph_bytes` of the device.
    """

    def __init__(self, session: OrtSession, device: HostDevice, used: UsedStep) -> None:
        self._session = session
        self._device = device
        self._used = used
        self.sliding_window = session.sliding_window
        self.run_ids: list[int] = []
        self.captured: dict[int, Callable[[], None]] = {}
        self.broken_captures: set[int] = set()
        self.graph_bytes = 0
        self.is_closed = False

    def new_binding(self) -> LateBinding:
        return LateBinding(self._session)

    def run(self, binding: LateBinding, graph_id: int) -> None:
        self.run_ids.append(graph_id)
        if graph_id in self.captured:
            self._device.enqueue("replay", self.captured[graph_id])
            return
        if graph_id in self.broken_captures:
            raise ExecutorError("a forward pass failed: CUDA error 900")
        forward = self._forward(binding.copy(), self._used.copy())
        for _ in range(1 if graph_id == EAGER else 3):
            self._device.enqueue("run", forward)
        if graph_id != EAGER:
            self._device.drain()
            self.captured[graph_id] = forward
            self._device.num_hidden_bytes += self.graph_bytes

    def _forward(self, binding: OrtBinding, step: CudaStep) -> Callable[[], None]:
        """A run that launches by `step`."""

        def run() -> None:
            in_use = self._used.address
            self._used(ctypes.addressof(step))
            try:
                self._session.run(binding, EAGER)
            finally:
                self._used(in_use)

        return run

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
        used, driver_launch = (
            UsedStep(library.functions.chairlift_cuda_use),
            library.functions.chairlift_cuda_driver_launch,
        )
        library.functions = SimpleNamespace(chairlift_cuda_use=used, chairlift_cuda_driver_launch=driver_launch)
        device = device or HostDevice(kernels.launch_address)
        precision = require_cuda_model(config, manifest)
        graph = cuda_graph(config.model_dir / PREFILL_NAME, manifest.model, device.op_domain, precision)
        if precision.scalar is Scalar.BF16:
            graph = replace(graph, content=computed_in_float32(graph.content, device.op_domain))
        loaded = OrtSession.load(config.model_dir, graph, library.path, device, captures=True)
        session = GraphSession(loaded, device, used)
        for name, value in of_session.items():
            setattr(session, name, value)
        parts = CudaParts(device, session, kernels.kernels, library, kernels.close, bounds or SamplingBounds())
        executor = CudaExecutor(config, manifest, parts)
        return cls(executor, device, session, kernels)
