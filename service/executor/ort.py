"""The CPU executor: one ONNX Runtime session over prefill.onnx runs every step.

On a CPU, prefill.onnx computes for a decode-only step what decode.onnx does, so one session, with one copy of the
weights, serves both. All memory that a step touches is allocated here, once, and bound by address.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from graphs.manifest import PREFILL_NAME, Manifest, ModelInfo
from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Float32Array, StepResult
from service.errors import ExecutorError, ModelFolderError
from service.executor.bound_session import BoundSession, session_options
from service.executor.buffers import aligned_zeros
from service.executor.config import ExecutorConfig
from service.executor.huge_pages import collapse_anonymous_memory
from service.executor.kv_layout import (
    KvArray,
    KvDtype,
    allocate_kv,
    copy_blocks,
    fit_kv_layout,
    parse_kv_memory,
)
from service.executor.limits import executor_limits
from service.executor.machine import available_memory_bytes, num_usable_cpus
from service.executor.model_variant import KV_INPUT_PREFIX, model_variant
from service.executor.op_library import OpLibrary
from service.executor.resident_weights import read_resident_weights
from service.executor.sample_rows import SampleRowsSession
from service.executor.sampler import Sampler, SamplingJob
from service.executor.step_inputs import StepInputBuffers

MIN_ROWS_INT4 = 2
"""MatMulNBits has a kernel of its own for one row of 4-bit weights, which on AVX2 rounds otherwise than the one for
more: a sequence would depend on whether others run beside it."""
WARM_UP_TOKENS = 512  # of one step: threads, code and the buffers' first pages are warm after these, soon enough


@dataclass(frozen=True, slots=True)
class ExecutionTimes:
    """Where an executor spent one step's time; the engine's StepTimes count it as a whole."""

    inputs_ns: int  # computing and binding the inputs
    forward_ns: int
    sampling_ns: int


class OrtExecutor:
    """Runs steps on the CPU. Owned by the engine thread; one step in flight at a time.

    `kv_cache` is the KV buffer, one array of `layout.layer_shape` per layer; steps change it in place.
    `last_times` is of the last step that was waited for.
    """

    def __init__(self, config: ExecutorConfig, manifest: Manifest) -> None:
        """Load the model and allocate all buffers. Raises ConfigError."""
        model = manifest.model
        library = OpLibrary()
        num_threads = self.num_threads = config.num_threads or num_usable_cpus()
        dtype = KvDtype.choose(config.kv_dtype, manifest.weight_format)
        self._session: BoundSession | None = _load_session(config, model, dtype, library, num_threads)
        # Filled weights move to huge pages before the KV buffer exists, which is empty and would be filled by it.
        self.num_collapsed_bytes = collapse_anonymous_memory()

        kv_memory_bytes = parse_kv_memory(config.kv_memory, available_memory_bytes())
        self.layout = fit_kv_layout(model, dtype, config.block_size, kv_memory_bytes)
        self.limits = executor_limits(config, model, self.layout)
        self.bind_kv_cache(allocate_kv(self.layout, prefault=config.kv_prefault == "on"))
        num_floats = library.attention_workspace_floats(model, self.limits)
        self._session.bind_input("workspace", aligned_zeros((num_floats,), np.float32))

        min_rows = MIN_ROWS_INT4 if manifest.weight_format == "int4" else 1
        self._inputs = StepInputBuffers(self.limits, min_rows)
        max_logits = max(config.max_num_seqs, min_rows)
        self._logits: Float32Array = aligned_zeros((max_logits, model.vocab_size), np.float32)
        self._sampler = Sampler(config.max_num_seqs)
        # Sampling is one short parallel region: threads that spin for it would only delay the next step's.
        options = session_options(library.path, num_threads, "off")
        self._row_sampler = SampleRowsSession(options, self._logits, self._sampler.params)
        self._bound_sizes = (0, 0, 0, 0)
        self._is_busy = False
        self.last_times = ExecutionTimes(0, 0, 0)

    def bind_kv_cache(self, arrays: list[KvArray]) -> None:
        """Use `arrays`, one per layer, as the KV buffer from the next step on."""
        self.kv_cache = arrays
        for layer, array in enumerate(arrays):
            self._open_session().bind_input(f"{KV_INPUT_PREFIX}{layer}", array)

    def warm_up(self) -> None:
        """Run a large step of each kind, so that the first request meets warm buffers. Writes no KV."""
        limits = self.limits
        batch = BatchState(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        batch.num_tokens[:] = batch.num_prompt_tokens[:] = 1
        chunk = min(limits.max_num_batched_tokens, limits.max_model_len, WARM_UP_TOKENS)
        num_decode_rows = min(limits.max_num_batched_tokens, limits.max_num_seqs, WARM_UP_TOKENS)
        for num_scheduled in (np.full(1, chunk, np.int32), np.ones(num_decode_rows, np.int32)):
            plan = StepPlan(
                step_id=0,
                rows=np.arange(len(num_scheduled), dtype=np.int32),
                num_scheduled=num_scheduled,
                samples=np.ones(len(num_scheduled), np.bool_),
                num_decode_rows=num_decode_rows if len(num_scheduled) > 1 else 0,
                num_tokens=int(num_scheduled.sum()),
            )
            self._start(plan, batch, writes_kv=False).wait()

    def dispatch(self, plan: StepPlan, batch: BatchState) -> "OrtStep":
        """Compute the step's inputs. The forward pass runs in the handle's `wait`."""
        return self._start(plan, batch, writes_kv=True)

    def end_profiling(self) -> Path:
        """Stop profiling and return the file with the time of every node; only with `config.profile_path` set."""
        return self._open_session().end_profiling()

    def close(self) -> None:
        """Free the sessions and the KV buffer; inputs and logits go with the executor itself. Idempotent."""
        self._session = None
        self._row_sampler.close()
        self.kv_cache = []

    def _start(self, plan: StepPlan, batch: BatchState, *, writes_kv: bool) -> "OrtStep":
        session = self._open_session()
        if self._is_busy:
            raise ExecutorError("a step was dispatched while another is in flight")
        started_ns = time.perf_counter_ns()
        if len(plan.block_copies):
            copy_blocks(self.kv_cache, plan.block_copies)
        inputs = self._inputs.fill(plan, batch)
        if not writes_kv:
            inputs.slot_mapping[:] = -1
        if inputs.sizes != self._bound_sizes:  # addresses never change, so equal shapes are bound already
            for name, array in inputs.named():
                session.bind_input(name, array)
            session.bind_output("logits", self._logits[: len(inputs.logit_indices)])
            self._bound_sizes = inputs.sizes
        rows = plan.rows if plan.is_decode_only else plan.rows[plan.samples]
        job = self._sampler.prepare(batch, rows)
        self._is_busy = True
        return OrtStep(self, job, time.perf_counter_ns() - started_ns)

    def _open_session(self) -> BoundSession:
        if self._session is None:
            raise ExecutorError("the executor is closed")
        return self._session

    def _run(self, job: SamplingJob, inputs_ns: int) -> StepResult:
        try:
            started_ns = time.perf_counter_ns()
            self._open_session().run()
            forward_end_ns = time.perf_counter_ns()
            result = self._sampler.finish(job, self._logits[: job.num_rows], self._row_sampler)
            end_ns = time.perf_counter_ns()
            self.last_times = ExecutionTimes(inputs_ns, forward_end_ns - started_ns, end_ns - forward_end_ns)
            return result
        finally:
            self._is_busy = False


class OrtStep:
    """A step whose inputs are bound. It holds the executor until `wait` returns."""

    can_continue: Final = False  # the host computes the step in `wait`, and has nothing to do meanwhile

    def __init__(self, executor: OrtExecutor, job: SamplingJob, inputs_ns: int) -> None:
        self._executor = executor
        self._job = job
        self._inputs_ns = inputs_ns

    def wait(self) -> StepResult:
        """Run the forward pass and sample. Raises ExecutorError."""
        return self._executor._run(self._job, self._inputs_ns)


def _load_session(
    config: ExecutorConfig, model: ModelInfo, dtype: KvDtype, library: OpLibrary, num_threads: int
) -> BoundSession:
    options = session_options(library.path, num_threads, config.spin)
    if config.profile_path is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(config.profile_path)
    path = config.model_dir / PREFILL_NAME
    variant = model_variant(path, model, dtype)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    weights = read_resident_weights(variant, path.parent)
    initializers = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    for name, value in zip(weights, initializers, strict=True):
        options.add_initializer(name, value)
    try:
        session = ort.InferenceSession(variant.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base but this
        raise ModelFolderError(f"{path}: ONNX Runtime cannot load it: {error}") from error
    return BoundSession(session, initializers)
