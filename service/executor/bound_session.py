"""An ONNX Runtime session whose inputs and outputs are arrays of ours, bound by address."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
import onnxruntime as ort

from service.errors import ConfigError, ExecutorError

Spin = Literal["off", "step"]
SPIN_US = 100
"""How long a worker waits for the next piece of a step before it sleeps, with spin "step". The gaps between parallel
pieces are shorter, so it seldom sleeps; on a machine with more work than cores it gives way soon."""


def session_options(library: Path, num_threads: int, spin: Spin) -> ort.SessionOptions:
    """Options that every session here shares: our ops, explicit threads, memory that does not grow with use.

    Raises ConfigError when the op library cannot be loaded.
    """
    options = ort.SessionOptions()
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:  # ONNX Runtime's exceptions share no base but this
        raise ConfigError(f"{library}: the op library cannot be loaded: {error}") from error
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # failures reach the caller as exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if spin == "off" else "1")
    if spin == "step":
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # A memory pattern is kept for every combination of input shapes ever seen: ragged batches never repeat theirs.
    options.enable_mem_pattern = False
    # The arena keeps what the largest step took. Without it large results come from fresh pages in every step, and
    # faulting them in outlasts the spinning of the other threads.
    options.enable_cpu_mem_arena = True
    return options


class BoundSession:
    """A session with its one IOBinding. The arrays stay the caller's; they are kept alive while bound."""

    def __init__(self, session: ort.InferenceSession, initializers: Sequence[ort.OrtValue] = ()) -> None:
        """`initializers` are what the session reads in place: kept as long as it is."""
        self._initializers = initializers
        self._session = session
        self._binding = session.io_binding()
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind the graph input `name` to `array`."""
        self._hold(name, array)
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind the graph output `name` to `array`, which must have the shape that the graph yields."""
        self._hold(name, array)
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self) -> None:
        """Run the graph on what is bound. Releases the interpreter lock. Raises ExecutorError."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions share no base but this
            raise ExecutorError(f"a forward pass failed: {error}") from error

    def end_profiling(self) -> Path:
        """Stop profiling and return the file that was written."""
        return Path(self._session.end_profiling())

    def _hold(self, name: str, array: npt.NDArray[Any]) -> None:
        if not array.flags.c_contiguous:
            raise ExecutorError(f"{name}: only C-ordered arrays can be bound")
        self._arrays[name] = array
