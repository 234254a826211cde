"""The ONNX Runtime session of a model on a GPU, run on tensors that are bound by device address.

There is one session, over prefill.onnx, and both kinds of steps run in it, so the weights are on the device once.
decode.onnx computes the same tokens for steps of one token a sequence (a test runs it); what it saves there is two
Gathers of rows that all stay. A session of its own would either load all weights a second time or take the first one's
device tensors as initializers, which has not been confirmed on a GPU; it would also have a second arena.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy.typing as npt
import onnxruntime as ort

from service.errors import ConfigError, ExecutorError, ModelFolderError
from service.executor.bound_session import session_options
from service.executor.cuda.device import Device, Provider
from service.executor.cuda.graph import CudaGraph
from service.executor.cuda.provider import provider_name, why_not_started

ElementType = npt.DTypeLike | int
"""Of a tensor; a number is ONNX's, for types that numpy lacks."""

EAGER: Final = -1
"""The graph id of a run that neither captures nor replays."""


# The end of a run is not waited for. A replay uses nothing of the run's own. An eager run's buffers go back to an arena
# of which the next run takes them on the same stream; pinned memory of operators would pile up, but those that use any
# cannot be captured either, and are not in our graphs.
_UNAWAITED: Final = ("disable_synchronize_execution_providers", "1")


class Binding(Protocol):
    """Tensors of one kind of step, by name."""

    def bind_input(self, name: str, address: int, dtype: ElementType, shape: tuple[int, ...]) -> None:
        """Bind a graph input to device memory."""
        ...

    def bind_output(self, name: str, address: int, dtype: ElementType, shape: tuple[int, ...]) -> None:
        """Bind a graph output to device memory; `shape` is what the graph yields."""
        ...


class Session(Protocol):
    """Runs one graph. Owned by the engine thread: CUDA graphs belong to the thread that captured them."""

    @property
    def sliding_window(self) -> int:
        """Tokens that a token of this model sees, itself included; 0: all before it."""
        ...

    def new_binding(self) -> Binding:
        """A binding without tensors."""
        ...

    def run(self, binding: Binding, graph_id: int) -> None:
        """Run on what is bound. An EAGER run is only enqueued, and what is bound may be replaced at once.

        Another id captures a CUDA graph in its first run, which computes three times, and returns when that is done.
        From the second run on it replays: what is bound is not looked at, and the run is only enqueued. Raises
        ExecutorError.
        """
        ...

    def close(self) -> None:
        """Free the model. Idempotent."""
        ...


class OrtBinding:
    """An IOBinding in one kind of memory. What is bound already is not bound again: most of a step's tensors."""

    def __init__(self, session: ort.InferenceSession, memory_name: str) -> None:
        self.io = session.io_binding()
        self._memory_name = memory_name
        self._bound: dict[str, tuple[int, ElementType, tuple[int, ...]]] = {}

    def bind_input(self, name: str, address: int, dtype: ElementType, shape: tuple[int, ...]) -> None:
        """See Binding."""
        if self._is_new(name, address, dtype, shape):
            self.io.bind_input(name, self._memory_name, 0, dtype, shape, address)

    def bind_output(self, name: str, address: int, dtype: ElementType, shape: tuple[int, ...]) -> None:
        """See Binding."""
        if self._is_new(name, address, dtype, shape):
            self.io.bind_output(name, self._memory_name, 0, dtype, shape, address)

    def _is_new(self, name: str, address: int, dtype: ElementType, shape: tuple[int, ...]) -> bool:
        tensor = address, dtype, shape
        if self._bound.get(name) == tensor:
            return False
        self._bound[name] = tensor
        return True


class OrtSession:
    """A `Session` over prefill.onnx."""

    def __init__(self, session: ort.InferenceSession, memory_name: str, sliding_window: int) -> None:
        self._session: ort.InferenceSession | None = session
        self._memory_name = memory_name
        self.sliding_window = sliding_window
        self._options: dict[int, ort.RunOptions] = {}
        self._captured: set[int] = set()

    @classmethod
    def load(
        cls,
        model_dir: Path,
        graph: CudaGraph,
        library: Path,
        device: Device,
        *,
        captures: bool,
        preload_said: str = "",
    ) -> "OrtSession":
        """Put a graph of `model_dir` on `device`. Raises ModelFolderError, and ConfigError when it cannot run it.

        `preload_said` is what loading the device's libraries complained about, for that error.
        """
        options = session_options(library, 1, "off")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model_dir))
        # Weights otherwise come from the arena, which rounds and never gives back what loading left over.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        asked = device.providers(captures=captures)
        provider = provider_name(asked[0])
        try:
            session = _create(graph, options, asked)
        except Exception as error:  # ONNX Runtime's exceptions share no base but this
            if provider_error := why_not_started(device, preload_said):
                raise provider_error from error
            if captures:
                _look_for_misplaced(graph, options, device, provider)
            raise ModelFolderError(f"{model_dir}: ONNX Runtime cannot load it: {error}") from error
        if session.get_providers()[0] != provider:
            raise why_not_started(device, preload_said) or ConfigError(f"{model_dir} was not loaded with {provider}")
        require_placement(session, provider)
        return cls(session, device.memory_name, graph.sliding_window)

    def new_binding(self) -> OrtBinding:
        """See Session."""
        return OrtBinding(self._open(), self._memory_name)

    def run(self, binding: Binding, graph_id: int) -> None:
        """See Session."""
        assert isinstance(binding, OrtBinding), "a binding of another session"
        try:
            self._open().run_with_iobinding(binding.io, self._run_options(graph_id))
        except Exception as error:  # ONNX Runtime's exceptions share no base but this
            raise ExecutorError(f"a forward pass failed: {error}") from error
        if graph_id != EAGER and graph_id not in self._captured:
            self._captured.add(graph_id)
            self._options[graph_id].add_run_config_entry(*_UNAWAITED)

    def close(self) -> None:
        """See Session."""
        self._session = None

    def _run_options(self, graph_id: int) -> ort.RunOptions:
        options = self._options.get(graph_id)
        if options is None:
            options = self._options[graph_id] = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph_id))
            if graph_id == EAGER:
                options.add_run_config_entry(*_UNAWAITED)
        return options

    def _open(self) -> ort.InferenceSession:
        if self._session is None:
            raise ExecutorError("the executor is closed")
        return self._session


def _create(graph: CudaGraph, options: ort.SessionOptions, providers: Sequence[Provider]) -> ort.InferenceSession:
    # Without its fallback, which is to print the error and to run everything on the CPU.
    return ort.InferenceSession(graph.content, options, providers=providers, enable_fallback=0)


def _look_for_misplaced(graph: CudaGraph, options: ort.SessionOptions, device: Device, provider: str) -> None:
    """Raise ConfigError when nodes elsewhere are why no session that captures could be made: it does not say which."""
    try:
        session = _create(graph, options, device.providers(captures=False))
    except Exception:  # something else is wrong, which the caller tells
        return
    require_placement(session, provider)


def require_placement(session: ort.InferenceSession, provider: str) -> None:
    """Raise ConfigError when a node was put elsewhere: there every step would wait for copies to the host and back.

    The session has recorded where its nodes went.
    """
    placed = session.get_provider_graph_assignment_info()
    elsewhere = [node for part in placed if part.ep_name != provider for node in part.get_nodes()]
    if elsewhere:
        first, computed = elsewhere[0], session.get_outputs()[0].type
        raise ConfigError(
            f"device: ONNX Runtime {ort.__version__} has no kernel in its {provider} for {len(elsewhere)} of the "
            f"model's nodes, the first {first.op_type} ({first.name!r}), where logits are {computed}"
        )
