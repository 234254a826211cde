"""Samples a step's rows: on the device where the sampling kernel can, else from logits copied to the host."""

import ctypes
from typing import Final

import numpy as np

from service.core.types import Float32Array, Int32Array, StepResult
from service.executor.cuda.device import Device
from service.executor.cuda.launch import Argument, KernelLaunch, LoadedKernel
from service.executor.cuda.memory import DeviceBuffer, PinnedBuffer, close_all
from service.executor.cuda.step_buffers import StepBuffers
from service.executor.sample_rows import SampleRowsSession
from service.executor.sampler import RowParams, Sampler, SamplingJob

_PARAMS: Final = RowParams.__slots__
_NUM_LEFT_OUT: Final = 9  # edits, masks and log-probabilities
_NO_TOKEN: Final = -1


class DeviceSampler:
    """Owns the tokens' memory and the pinned logits of steps that the host samples. Engine thread.

    Sampling is enqueued behind the forward pass by `enqueue`; `finish` is called when the device is done.
    """

    def __init__(self, device: Device, kernel: LoadedKernel, logits: DeviceBuffer, shape: tuple[int, int]) -> None:
        """`logits` float16 of `shape` [max_num_seqs, vocab_size] is where forward passes leave them."""
        self._device = device
        self._kernel = kernel
        self._logits = logits
        self._max_rows, self._vocab_size = shape
        self._tokens = DeviceBuffer(device, 4 * self._max_rows)
        self._pinned_tokens = PinnedBuffer(device, 4 * self._max_rows)
        self._pinned_logits = PinnedBuffer(device, 2 * self._max_rows * self._vocab_size)
        self._launches: dict[int, KernelLaunch] = {}  # by the buffers that hold the parameters

    def enqueue(self, job: SamplingJob, buffers: StepBuffers) -> None:
        """Sample the rows of `job`, whose parameters lie in `buffers`, and copy back what `finish` needs."""
        if not job.num_rows:
            return
        if self._is_for_host(job):
            self._device.copy_out(self._host_logits(job.num_rows), self._logits.address)
            return
        key = buffers.address("temperature")
        if key not in self._launches:
            arguments = self._arguments(buffers)
            address, stream = self._device.launch_address, self._device.stream
            self._launches[key] = KernelLaunch(address, self._kernel, stream, arguments)
        self._launches[key](job.num_rows)
        self._device.copy_out(self._host_tokens(job.num_rows), self._tokens.address)

    def finish(self, job: SamplingJob, sampler: Sampler, host: "HostSampler") -> StepResult:
        """The step's tokens; call it when the device is done. Raises ExecutorError."""
        if not job.num_rows:
            return StepResult(token_ids=np.empty(0, np.int32))
        if self._is_for_host(job):
            return host.finish(job, sampler, self._host_logits(job.num_rows))
        token_ids = self._host_tokens(job.num_rows).copy()
        failed = np.flatnonzero(token_ids == _NO_TOKEN)
        token_ids[failed] = 0  # any token will do
        return StepResult(token_ids=token_ids, failed=failed)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        close_all((self._tokens, self._pinned_tokens, self._pinned_logits))

    @staticmethod
    def _is_for_host(job: SamplingJob) -> bool:
        return bool(job.edits or job.num_logprobs)

    def _host_tokens(self, num_rows: int) -> Int32Array:
        return self._pinned_tokens.view((num_rows,), np.int32)

    def _host_logits(self, num_rows: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float16]]":
        return self._pinned_logits.view((num_rows, self._vocab_size), np.float16)

    def _arguments(self, buffers: StepBuffers) -> list[Argument]:
        """Of the kernel `sample_rows` (cuda/README.md), without its optional parts."""
        pointers = [self._logits.address, *(buffers.address(name) for name in _PARAMS)]
        pointers += [0] * _NUM_LEFT_OUT
        pointers += [self._tokens.address, 0, 0, 0]
        return [*map(ctypes.c_void_p, pointers), ctypes.c_int32(self._vocab_size), ctypes.c_int32(0)]


class HostSampler:
    """The CPU executor's sampling over a copy of the logits, widened."""

    def __init__(self, session: SampleRowsSession, logits: Float32Array) -> None:
        """`session` samples rows of `logits`."""
        self._session = session
        self._logits = logits

    def finish(
        self, job: SamplingJob, sampler: Sampler, logits: "np.ndarray[tuple[int, ...], np.dtype[np.float16]]"
    ) -> StepResult:
        """Sample `logits` [num_rows, vocab_size]."""
        wide = self._logits[: job.num_rows]
        wide[:] = logits
        return sampler.finish(job, wide, self._session)

    def close(self) -> None:
        """Free the session. Idempotent."""
        self._session.close()
