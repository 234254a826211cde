"""Runs staged steps: which tensors, which plan, which CUDA graph. No scheduling; the graph samples."""

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import structlog

from graphs.manifest import ModelInfo
from service.core.plan import NO_ROWS
from service.core.types import Int32Array
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits
from service.executor.cuda.capture import BucketGraphs
from service.executor.cuda.device import Device
from service.executor.cuda.launch import CudaOps, CudaStep, ModelKernels
from service.executor.cuda.memory import DeviceBuffer, DeviceKv
from service.executor.cuda.null_steps import null_decode_step
from service.executor.cuda.plan_layout import DECODE_ROWS, PlanCounts, PlanLimits
from service.executor.cuda.requirements import require_step_size
from service.executor.cuda.row_edits import RowEdits, SamplingBounds
from service.executor.cuda.sample_outputs import SAMPLED, SampleOutputs
from service.executor.cuda.session import EAGER, Binding, Session
from service.executor.cuda.step_buffers import EDIT_COLUMNS, PARAM_DTYPES, StepBuffers
from service.executor.model_variant import KV_INPUT_PREFIX
from service.executor.sampler import RowParams, Sampler
from service.executor.step_inputs import StepInputs

NO_PARAMS: Final = Sampler(0).params
"""Of steps whose tokens nobody wants."""
ONE_SLICE_EACH: Final = (1 << 31) - 1
"""Blocks of sample_scan that any step's slices are fewer than: log-probabilities are summed the same in every batch."""

log = structlog.get_logger("chairlift.cuda")


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner works with; it owns none of it."""

    device: Device
    ops: CudaOps
    session: Session
    kernels: ModelKernels
    graphs: BucketGraphs
    bounds: SamplingBounds


class StepRunner:
    """Owns the device's buffers but the KV's. One thread, which is the one that captures and replays."""

    def __init__(self, parts: RunnerParts, model: ModelInfo, limits: ExecutorLimits, *, is_deterministic: bool) -> None:
        """Allocate. Raises ConfigError when memory is lacking, or steps are too large for a launch."""
        self._parts = parts
        device, kernels = parts.device, parts.kernels
        resident = [device.num_sms * device.blocks_per_sm(each) for each in (kernels.attn_decode, kernels.attn_prefill)]
        num_ranges, prefill_blocks = (max(1, each // model.num_kv_heads) for each in resident)
        decode = PlanLimits(
            num_ranges=num_ranges,
            group_size=model.num_heads // model.num_kv_heads,
            max_seqs=limits.max_num_seqs,
            max_tokens=limits.max_num_seqs,
            max_context=limits.max_model_len,
            tile_tokens=kernels.tile_tokens,
            prefill_rows=kernels.prefill_rows,
            sliding_window=parts.session.sliding_window,
            is_deterministic=is_deterministic,
        )
        mixed = replace(decode, max_tokens=limits.max_num_batched_tokens, resident_prefill_blocks=prefill_blocks)
        require_step_size(limits, mixed)
        self._num_ranges, self._max_decode_merges = decode.num_ranges, decode.max_decode_merges
        resident_scans = device.num_sms * device.blocks_per_sm(kernels.sample_scan)
        self._sample_blocks = ONE_SLICE_EACH if is_deterministic else resident_scans
        self._num_floats = mixed.max_slots * model.num_kv_heads * DECODE_ROWS * (model.head_dim + 1)
        with ExitStack() as undo:
            self.decode, self.mixed = (
                undo.enter_context(
                    closing(StepBuffers(device, limits, plan_limits, parts.bounds, has_prefill=plan_limits is mixed))
                )
                for plan_limits in (decode, mixed)
            )
            self._workspace = undo.enter_context(closing(DeviceBuffer(device, 4 * self._num_floats)))
            shape = (limits.max_num_seqs, model.vocab_size)
            self.outputs = undo.enter_context(
                closing(SampleOutputs(device, shape, parts.bounds.max_top, kernels.scalar_type))
            )
            self._owned = undo.pop_all()
        self._decode_step = self._cuda_step(self.decode, mixed.max_slots)
        self._decode_step.num_ranges = decode.num_ranges  # whatever the step: a captured graph's grid
        self._mixed_step = self._cuda_step(self.mixed, mixed.max_slots)
        self._kv: DeviceKv | None = None
        self._bindings: dict[int, Binding] = {}  # of each bucket, and under EAGER that of all other steps

    def bind_kv(self, kv: DeviceKv) -> None:
        """Use another KV buffer from the next step on. Graphs hold its addresses: all are captured again."""
        self._kv = kv
        self._parts.graphs.forget()
        self._bindings.clear()

    def next_table(self, *, is_decode_only: bool) -> Int32Array:
        """Where the block table of the next step of that kind had best lie: see StepBuffers."""
        return (self.decode if is_decode_only else self.mixed).next_table

    def run_mixed(
        self, inputs: StepInputs, params: RowParams, edits: RowEdits | None, continues: Int32Array = NO_ROWS
    ) -> bool:
        """Enqueue a step with chunks, which leaves `outputs`; yields True: it is only enqueued.

        With `continues` its first tokens are those of the step before, which may be in flight: see StepPlan. Raises
        ExecutorError.
        """
        counts = self.mixed.stage(inputs, params, edits, len(inputs.context_lens))
        self._carry_tokens(self.mixed, continues)
        self._run_mixed(inputs, counts)
        return True

    def run_decode(
        self, inputs: StepInputs, params: RowParams, edits: RowEdits | None, continues: Int32Array = NO_ROWS
    ) -> bool:
        """The same of a decode step; False: it has captured a graph, and is done."""
        num_rows = len(inputs.context_lens)
        bucket = self._parts.graphs.bucket_for(num_rows)
        self.decode.stage(inputs, params, edits, bucket or num_rows)
        self._carry_tokens(self.decode, continues)
        return self._run_decode(bucket, num_rows)

    def _carry_tokens(self, buffers: StepBuffers, continues: Int32Array) -> None:
        """Copy sampled tokens to where the next step's are read, in as many runs as there are.

        A row that could not be sampled from goes on with token -1, which is the embedding's last: the host fails it.
        """
        if not len(continues):
            return
        starts = np.append(0, 1 + np.flatnonzero(np.diff(continues) != 1))
        ends = np.append(starts[1:], len(continues))
        read, sampled = buffers.address("token_ids"), self.outputs.address("token")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self._parts.device.copy_within(read + 4 * start, sampled + 4 * int(continues[start]), 4 * (end - start))

    def run_decode_eagerly(self, inputs: StepInputs) -> None:
        """Run a decode step, unpadded, without a graph, for nobody. Waits for all that was enqueued."""
        self.decode.stage(inputs, NO_PARAMS, None, len(inputs.context_lens))
        self._run_decode(None, len(inputs.context_lens))
        self._parts.device.wait()

    def capture_all(self) -> None:
        """Capture the graphs of all buckets that are not given up, largest first. Logs progress."""
        buckets, num_captured = self._parts.graphs.buckets[::-1], 0
        for bucket in buckets:
            started = time.perf_counter()
            if not self.capture(bucket):
                continue
            num_captured += 1
            took_s = round(time.perf_counter() - started, 3)
            log.info("cuda.captured", bucket=bucket, num_captured=num_captured, num_buckets=len(buckets), took_s=took_s)

    def capture(self, bucket: int) -> bool:
        """Capture the graph of `bucket`, which has none, on a step of the null block; yields whether it has one now.

        A bucket that cannot be captured is given up with a warning: its steps run in a larger one, or eagerly.
        """
        self.decode.stage(null_decode_step(bucket), NO_PARAMS, None, bucket)
        self._run_decode(bucket, bucket)
        self._parts.device.wait()  # nor has an eager step been waited for that was run in its stead
        return self._parts.graphs.has_graph(bucket)

    def _run_decode(self, bucket: int | None, num_rows: int) -> bool:
        """Run what is staged; yields whether that is only enqueued: it captures no graph."""
        parts = self._parts
        num_seqs = bucket or num_rows
        self._decode_step.merge_blocks = min(num_seqs, self._max_decode_merges)  # in a captured graph, by its bucket
        parts.ops.use(self._decode_step)
        sizes = (num_seqs, num_seqs, num_seqs)
        if bucket is None:
            self._run_unpadded(self.decode, sizes)
            return True
        binding = self._bindings.get(bucket)
        if binding is None:
            binding = self._new_binding(bucket)
            self._bind(binding, self.decode, sizes)
        graph_id, is_new = parts.graphs.id_of(bucket)
        try:
            parts.session.run(binding, graph_id)
        except ExecutorError as error:
            if not is_new:
                raise
            log.warning("cuda.capture_failed", bucket=bucket, error=str(error))
            parts.graphs.give_up(bucket)
            parts.session.run(binding, EAGER)
            return True
        return not is_new

    def _run_mixed(self, inputs: StepInputs, counts: PlanCounts) -> None:
        step = self._mixed_step
        step.num_ranges = self._num_ranges if counts.num_decode_items else 0
        step.prefill_blocks, step.merge_blocks = counts.num_prefill_items, counts.num_merges
        self._parts.ops.use(step)
        sizes = (len(inputs.token_ids), len(inputs.context_lens), len(inputs.logit_indices))
        self._run_unpadded(self.mixed, sizes)

    def _run_unpadded(self, buffers: StepBuffers, sizes: tuple[int, int, int]) -> None:
        binding = self._bindings.get(EAGER) or self._new_binding(EAGER)
        self._bind(binding, buffers, sizes)
        self._parts.session.run(binding, EAGER)

    def _new_binding(self, bucket: int) -> Binding:
        """A binding of what never changes while the KV buffer stays."""
        assert self._kv is not None, "a KV buffer is bound before any step"
        binding = self._bindings[bucket] = self._parts.session.new_binding()
        for layer, address in enumerate(self._kv.addresses):
            shape = self._kv.layout.layer_shape
            binding.bind_input(f"{KV_INPUT_PREFIX}{layer}", address, self._parts.kernels.kv_type, shape)
        binding.bind_input("workspace", self._workspace.address, np.float32, (self._num_floats,))
        return binding

    def _bind(self, binding: Binding, buffers: StepBuffers, sizes: tuple[int, int, int]) -> None:
        """Bind what differs between kinds and sizes of steps: numbers of tokens, sequences and rows with logits."""
        num_tokens, num_seqs, num_logits = sizes
        for name in ("token_ids", "positions", "slot_mapping"):
            binding.bind_input(name, buffers.address(name), np.int32, (num_tokens,))
        binding.bind_input("cu_seqlens", buffers.address("cu_seqlens"), np.int32, (num_seqs + 1,))
        binding.bind_input("context_lens", buffers.address("context_lens"), np.int32, (num_seqs,))
        binding.bind_input("block_table", buffers.table_address, np.int32, (num_seqs, buffers.table_stride))
        binding.bind_input("logit_indices", buffers.address("logit_indices"), np.int32, (num_logits,))
        for name, dtype in PARAM_DTYPES.items():
            binding.bind_input(name, buffers.address(name), dtype, (num_logits,))
        outputs = self.outputs
        binding.bind_output("logits", outputs.logits, self._parts.kernels.scalar_type, (num_logits, outputs.vocab_size))
        binding.bind_output("token", outputs.address("token"), np.int32, (num_logits,))

    def _cuda_step(self, buffers: StepBuffers, num_slots: int) -> CudaStep:
        step = CudaStep.of(self._parts.device.launch_address, self._parts.kernels)
        for name, address in buffers.plan_addresses.items():
            setattr(step, name, address)
        for name in ("penalties", "edit_indptr", *EDIT_COLUMNS, "num_logprobs"):
            setattr(step, name, buffers.address(name))
        for name in SAMPLED[1:]:  # the tokens are an output of the graph
            setattr(step, name, self.outputs.address(name))
        step.sample_workspace, step.sample_blocks = self.outputs.workspace, self._sample_blocks
        step.num_slots, step.max_top = num_slots, self.outputs.max_top
        return step

    def close(self) -> None:
        """Free the buffers. Idempotent."""
        self._parts.ops.use(None)
        self._bindings.clear()
        self._owned.close()
