"""Samples a step's rows on the device; rows that ask for more than its kernel is given here once more on the host."""

import ctypes
from contextlib import ExitStack, closing
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from service.core.types import Float32Array, Int32Array, StepResult
from service.executor.buffers import aligned_zeros
from service.executor.cuda.device import Device
from service.executor.cuda.launch import Argument, KernelLaunch, LoadedKernel
from service.executor.cuda.memory import DeviceBuffer, PinnedBuffer
from service.executor.cuda.step_buffers import StepBuffers
from service.executor.sample_rows import SampleRowsSession
from service.executor.sampler import RowParams, Sampler, SamplingJob

Float16Array = npt.NDArray[np.float16]

_PARAMS: Final = RowParams.__slots__
_NUM_LEFT_OUT: Final = 9  # edits, masks and log-probabilities
_NO_TOKEN: Final = -1
_LOGIT_BYTES: Final = 2


class DeviceSampler:
    """Owns the tokens' memory, and the pinned logits of rows that the host samples. Engine thread.

    Sampling is enqueued behind the forward pass by `enqueue`; `finish` is called when the device is done.
    """

    def __init__(
        self, device: Device, kernel: LoadedKernel, logits: DeviceBuffer, shape: tuple[int, int], host: "HostSampler"
    ) -> None:
        """`logits` float16 of `shape` [max_num_seqs, vocab_size] is where forward passes leave them."""
        self._device = device
        self._kernel = kernel
        self._logits = logits
        self._host = host
        max_rows, self._vocab_size = shape
        with ExitStack() as undo:
            # The device's last, to be freed first: that waits for what is in flight, which may still write the others.
            self._pinned_tokens = undo.enter_context(closing(PinnedBuffer(device, 4 * max_rows)))
            logits_bytes = _LOGIT_BYTES * max_rows * self._vocab_size
            self._pinned_logits = undo.enter_context(closing(PinnedBuffer(device, logits_bytes)))
            self._tokens = undo.enter_context(closing(DeviceBuffer(device, 4 * max_rows)))
            self._owned = undo.pop_all()
        self._launches: dict[int, KernelLaunch] = {}  # by the buffers that hold the parameters

    def enqueue(self, job: SamplingJob, params: RowParams, buffers: StepBuffers) -> None:
        """Sample the rows of `job`, whose `params` also lie in `buffers`, and copy back what `finish` needs."""
        if not job.num_rows:
            return
        self._launch(buffers)(job.num_rows)
        self._device.copy_out(self._host_tokens(job.num_rows), self._tokens.address)
        rows = rows_for_host(job)
        if not rows:
            return
        self._host.take(params, rows)
        row_bytes = _LOGIT_BYTES * self._vocab_size
        for target, row in zip(self._host_logits(len(rows)), rows, strict=True):
            self._device.copy_out(target, self._logits.address + row * row_bytes)

    def finish(self, job: SamplingJob) -> StepResult:
        """The step's tokens; call it when the device is done. Raises ExecutorError."""
        if not job.num_rows:
            return StepResult(token_ids=np.empty(0, np.int32))
        token_ids = self._host_tokens(job.num_rows).copy()
        is_failed = token_ids == _NO_TOKEN
        token_ids[is_failed] = 0  # any token will do
        rows = rows_for_host(job)
        if not rows:
            return StepResult(token_ids=token_ids, failed=np.flatnonzero(is_failed))
        found = self._host.finish(job, rows, self._host_logits(len(rows)))
        token_ids[rows] = found.token_ids
        is_failed[rows] = False
        is_failed[np.array(rows)[found.failed]] = True
        logprobs = {rows[place]: value for place, value in found.logprobs.items()}
        return StepResult(token_ids=token_ids, logprobs=logprobs, failed=np.flatnonzero(is_failed))

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owned.close()

    def _host_tokens(self, num_rows: int) -> Int32Array:
        return self._pinned_tokens.view((num_rows,), np.int32)

    def _host_logits(self, num_rows: int) -> Float16Array:
        return self._pinned_logits.view((num_rows, self._vocab_size), np.float16)

    def _launch(self, buffers: StepBuffers) -> KernelLaunch:
        """The kernel `sample_rows` (cuda/README.md), without its optional parts, on the parameters in `buffers`."""
        key = buffers.address("temperature")
        if key not in self._launches:
            pointers = [self._logits.address, *(buffers.address(name) for name in _PARAMS)]
            pointers += [0] * _NUM_LEFT_OUT
            pointers += [self._tokens.address, 0, 0, 0]
            sizes = (ctypes.c_int32(self._vocab_size), ctypes.c_int32(0))
            arguments: list[Argument] = [*map(ctypes.c_void_p, pointers), *sizes]
            address, stream = self._device.launch_address, self._device.stream
            self._launches[key] = KernelLaunch(address, self._kernel, stream, arguments)
        return self._launches[key]


class HostSampler:
    """The CPU executor's sampling, over rows of logits that were copied back and are widened. Engine thread."""

    def __init__(self, options: ort.SessionOptions, shape: tuple[int, int]) -> None:
        """For at most `shape` [max_num_seqs, vocab_size] logits."""
        self._logits: Float32Array = aligned_zeros(shape, np.float32)
        self._sampler = Sampler(shape[0])
        self._session = SampleRowsSession(options, self._logits, self._sampler.params)

    def take(self, params: RowParams, rows: list[int]) -> None:
        """Keep the parameters of `rows`, which the next step's replace."""
        ours = self._sampler.params.prefix(len(rows))
        for name in _PARAMS:
            getattr(ours, name)[:] = getattr(params, name)[rows]

    def finish(self, job: SamplingJob, rows: list[int], logits: Float16Array) -> StepResult:
        """Sample `logits` [len(rows), vocab_size] of the `rows` of `job`; the result's indices are places in `rows`."""
        wide = self._logits[: len(rows)]
        wide[:] = logits
        place_of = {row: place for place, row in enumerate(rows)}
        edits = {place_of[row]: edit for row, edit in job.edits.items()}
        num_logprobs = {place_of[row]: number for row, number in job.num_logprobs.items()}
        return self._sampler.finish(SamplingJob(len(rows), edits, num_logprobs), wide, self._session)

    def close(self) -> None:
        """Free the session. Idempotent."""
        self._session.close()


def rows_for_host(job: SamplingJob) -> list[int]:
    """Rows that ask for what the kernel could do, but is not given here: edits and log-probabilities. Ascending."""
    return sorted({*job.edits, *job.num_logprobs})
