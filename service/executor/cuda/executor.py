"""The CUDA executor: decode steps replay the CUDA graph of their bucket, others run eagerly, one session for both.

A step: inputs, attention plan, sampling parameters and edits of logits are staged in pinned memory and copied over, the
forward pass runs, which ends with the tokens, and these are copied back, with log-probabilities if asked; `wait` blocks
once for all of it. Rows that ask for more than SamplingBounds have their logits copied back as well, and are sampled on
the host.

A step is only enqueued, unless it captures a graph: the one planned ahead of its result follows it at once, in other
pinned memory, and takes its tokens where the device left them. Each is waited for by a mark behind its own results.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from graphs.manifest import Manifest
from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import StepResult
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits
from service.executor.bound_session import session_options
from service.executor.config import ExecutorConfig
from service.executor.cuda.capture import BucketGraphs, checked_buckets
from service.executor.cuda.device import Device
from service.executor.cuda.host_kv import HostKv, create_host_kv
from service.executor.cuda.launch import CudaOps, ModelKernels
from service.executor.cuda.memory import DeviceKv
from service.executor.cuda.null_steps import chunk_shapes, null_chunks, null_decode_step
from service.executor.cuda.precision import Precision
from service.executor.cuda.row_edits import DividedJob, SamplingBounds, divide
from service.executor.cuda.runner import NO_PARAMS, RunnerParts, StepRunner
from service.executor.cuda.sampling import HostSampler, SampledRows
from service.executor.cuda.session import Session
from service.executor.kv_layout import KvLayout, fit_kv_layout, parse_kv_memory
from service.executor.limits import executor_limits
from service.executor.op_library import OpLibrary
from service.executor.sampler import Sampler
from service.executor.step_inputs import StepInputBuffers

log = structlog.get_logger("chairlift.cuda")

_PROBE_BLOCKS: Final = 2  # the null block, and one more, since no KV buffer is smaller
_MARGIN: Final = 64  # one part of so many of what steps leave stays free: in other proportions one may take more


@dataclass(frozen=True, slots=True)
class CudaParts:
    """What an executor is put together from; it owns device, session and kernels."""

    device: Device
    session: Session
    kernels: ModelKernels
    library: OpLibrary
    release_kernels: Callable[[], None]
    bounds: SamplingBounds = field(default_factory=SamplingBounds)


class CudaExecutor:
    """Runs steps on a GPU. Made on any thread, then used by the engine thread alone.

    One step is in flight at a time, and one that is ahead of its result. Two lanes of what each needs are used in turn.
    """

    def __init__(self, config: ExecutorConfig, manifest: Manifest, parts: CudaParts) -> None:
        """Allocate all buffers, the KV buffer last, from what measured steps leave. Raises ConfigError."""
        model = manifest.model
        self._device, self._session, self._release_kernels = parts.device, parts.session, parts.release_kernels
        self._capture = config.capture
        self._graphs = BucketGraphs(checked_buckets(config.capture_buckets, config.max_num_seqs), config.capture)
        dtype = Precision.choose(config.kv_dtype, manifest).kv_dtype
        probe = KvLayout(dtype, model.num_layers, _PROBE_BLOCKS, model.num_kv_heads, config.block_size, model.head_dim)
        limits = executor_limits(config, model, probe)
        ops = CudaOps(parts.library.functions)
        runner_parts = RunnerParts(parts.device, ops, parts.session, parts.kernels, self._graphs, parts.bounds)
        self._in_flight: deque[CudaStepHandle] = deque()
        self._is_closed = False
        with ExitStack() as undo:
            self._runner = undo.enter_context(
                closing(StepRunner(runner_parts, model, limits, is_deterministic=config.deterministic == "on"))
            )
            shape = (limits.max_num_seqs, model.vocab_size)
            options = session_options(parts.library.path, 1, "off")
            host = undo.enter_context(closing(HostSampler(options, shape, self._runner.outputs.logit_dtype)))
            sampled = SampledRows(parts.device, self._runner.outputs, host)
            self._sampled = undo.enter_context(closing(sampled))
            self._sampler, self._bounds = Sampler(limits.max_num_seqs), parts.bounds
            reserved_bytes = self._measure(limits, probe)
            available = max(0, parts.device.free_bytes() - reserved_bytes)
            available -= available // _MARGIN
            kv_memory_bytes = parse_kv_memory(config.kv_memory, available)
            self.layout = fit_kv_layout(model, dtype, config.block_size, kv_memory_bytes)
            self._kv = undo.enter_context(closing(DeviceKv(parts.device, self.layout)))
            self._runner.bind_kv(self._kv)
            self.limits = replace(limits, num_blocks=self.layout.num_blocks)
            self._host_kv = self._create_host_kv(config.host_kv_memory, undo)
            self._owned = undo.pop_all()
        self._inputs = StepInputBuffers(self.limits)
        log.info(
            "cuda.memory", reserved_bytes=reserved_bytes, available_bytes=available, kv_bytes=self.layout.total_bytes
        )

    def warm_up(self) -> None:
        """Run a large step of each kind on the null block and capture all buckets, largest first. Writes no KV."""
        self._device.make_current()
        self._run_large_steps(self.limits, chunk_shapes(self.limits)[:1])
        if self._capture == "eager":
            self._runner.capture_all()
        self._device.wait()

    def dispatch(self, plan: StepPlan, batch: BatchState) -> "CudaStepHandle":
        """Enqueue the step. A forward pass that captures is done when this returns."""
        if self._is_closed:
            raise ExecutorError("the executor is closed")
        if [step.can_continue for step in self._in_flight] != ([True] if plan.is_ahead else []):
            raise ExecutorError("a step was dispatched while another is in flight, which it does not go on with")
        self._device.make_current()
        try:
            step = self._enqueue(plan, batch)
        except Exception:
            for before in self._in_flight:
                before.can_continue = False  # this step's tokens may have replaced its own on the device
            # Copies that were enqueued may still read pinned memory, which the next step overwrites.
            with suppress(ExecutorError):  # a device that cannot be waited for reads no more; the first error is told
                self._device.wait()
            raise
        self._in_flight.append(step)
        return step

    def _enqueue(self, plan: StepPlan, batch: BatchState) -> "CudaStepHandle":
        if self._host_kv is not None:
            self._host_kv.copy(plan)
        if len(plan.block_copies):
            self._kv.copy_blocks(plan.block_copies)
        inputs = self._inputs.fill(plan, batch, self._runner.next_table(is_decode_only=plan.is_decode_only))
        rows = plan.rows if plan.is_decode_only else plan.rows[plan.samples]
        job = self._sampler.prepare(batch, rows, len(plan.continues))
        params = self._sampler.params.prefix(job.num_rows)
        divided = divide(job, self._bounds)
        run = self._runner.run_decode if plan.is_decode_only else self._runner.run_mixed
        is_enqueued = run(inputs, params, divided.edits, plan.continues)
        lane = 1 - self._in_flight[-1].lane if self._in_flight else 0
        self._sampled.enqueue(divided, params, lane)
        self._device.mark(lane)
        return CudaStepHandle(self, divided, lane, can_continue=is_enqueued and not divided.holds_up_next)

    def close(self) -> None:
        """Wait for what is in flight, then free sessions, buffers and the device, whatever fails. Idempotent.

        Raises ExecutorError when something cannot be freed, as after a fault: then nothing on the device can.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as owned:
            owned.callback(self._device.close)
            owned.callback(self._release_kernels)
            owned.callback(self._session.close)
            owned.callback(self._owned.close)
            self._device.make_current()
            with suppress(ExecutorError):  # then it uses nothing any more
                self._device.wait()

    def _finish(self, step: "CudaStepHandle") -> StepResult:
        assert self._in_flight[0] is step, "steps are waited for in order, each once"
        try:
            self._device.wait_for(step.lane)
            return self._sampled.finish(step.divided, step.lane)
        finally:
            self._in_flight.popleft()

    def _create_host_kv(self, memory: str, undo: ExitStack) -> HostKv | None:
        """Host memory below the KV buffer, if any is wanted, which `undo` closes; `limits` tell of it."""
        host_kv = create_host_kv(self._device, self._kv, memory)
        if host_kv is None:
            return None
        undo.enter_context(closing(host_kv))
        block_ns = host_kv.measure_block_ns()
        self.limits = replace(self.limits, num_host_blocks=host_kv.num_blocks, host_block_ns=block_ns)
        log.info("cuda.host_kv", num_blocks=host_kv.num_blocks, block_us=round(block_ns / 1e3, 1))
        return host_kv

    def _measure(self, limits: ExecutorLimits, probe: KvLayout) -> int:
        """Bytes to keep free for what the engine thread will still take; leaves the arena as large as steps need it.

        Large steps are run on a KV buffer of two blocks, and the largest bucket is captured that can be. What a first
        run and a capture take is taken again: the first by the engine thread, whose handles are its own, the second by
        each bucket. The arena grows by exactly what a step lacks, and what it has is cut as earlier steps needed it: so
        steps of several proportions are run, the largest first.
        """
        device = self._device
        with closing(DeviceKv(device, probe)) as kv:
            self._runner.bind_kv(kv)
            free_bytes = device.free_bytes()
            self._runner.run_decode_eagerly(null_decode_step(1))
            first_run_bytes = max(0, free_bytes - device.free_bytes())
            self._run_large_steps(limits, chunk_shapes(limits))
            graph_bytes = self._measure_graph()
            device.wait()
        return first_run_bytes + graph_bytes * len(self._graphs.buckets)

    def _measure_graph(self) -> int:
        """Bytes that the graph of the largest bucket takes that can be captured; 0: none can, or none is wanted."""
        for bucket in self._graphs.buckets[::-1]:
            free_bytes = self._device.free_bytes()
            if self._runner.capture(bucket):
                return max(0, free_bytes - self._device.free_bytes())
        return 0

    def _run_large_steps(self, limits: ExecutorLimits, shapes: Sequence[tuple[int, int]]) -> None:
        """Run mixed steps of these tokens and sequences, and then the largest decode step.

        Before any graph is captured the largest chunk must have run. ONNX Runtime's Gemm adds biases by a buffer of
        ones that is as long as the step; where it grows, the shorter one is freed, and graphs that were captured
        before would read it (models with biases on queries, keys and values).
        """
        for num_tokens, num_seqs in shapes:
            self._runner.run_mixed(null_chunks(num_tokens, num_seqs, limits.block_size), NO_PARAMS, None)
            self._device.wait()  # the step after the next one is staged where this one was
        self._runner.run_decode_eagerly(null_decode_step(limits.max_num_seqs))


class CudaStepHandle:
    """A step that is enqueued. It holds its lane of the executor until `wait` returns."""

    def __init__(self, executor: CudaExecutor, divided: DividedJob, lane: int, *, can_continue: bool) -> None:
        self.can_continue = can_continue
        self.divided = divided
        self.lane = lane
        self._executor = executor

    def wait(self) -> StepResult:
        """Wait for the device. Raises ExecutorError."""
        return self._executor._finish(self)
