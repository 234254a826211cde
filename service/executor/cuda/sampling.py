"""What was sampled on the device comes back to the host, which samples the rows that the device could not.

Such rows' logits are copied back as well, and are edited and sampled as the device would have done it. They are rare:
there is room for a few, and more are sampled in rounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from service.core.types import Float32Array, Int32Array, StepResult, TokenLogprobs
from service.executor.buffers import aligned_zeros
from service.executor.cuda.device import Device
from service.executor.cuda.memory import PinnedBuffer
from service.executor.cuda.row_edits import DividedJob
from service.executor.cuda.sample_outputs import LOGIT_BYTES, SAMPLED, SampleOutputs
from service.executor.sample_rows import SampleRowsSession
from service.executor.sampler import RowParams, Sampler, SamplingJob

HalfArray = npt.NDArray[Any]  # float16 or bfloat16

_NO_TOKEN: Final = -1
_HOST_ROWS: Final = 8  # of a round; page-locked: 2.4 MB with 152,000 tokens


class SampledRows:
    """Owns the pinned memory that results come back to. Engine thread.

    `enqueue` follows the forward pass; `finish` is called when the device is done. Two steps can be in flight, in
    lanes 0 and 1. Of these the earlier one has no rows that the host samples: nothing follows such a step before it is
    waited for (`DividedJob.holds_up_next`), so logits need one place.
    """

    def __init__(self, device: Device, outputs: SampleOutputs, host: "HostSampler") -> None:
        """`outputs` is where forward passes leave their results. Raises ConfigError when memory is lacking."""
        self._device = device
        self._outputs = outputs
        self._host = host
        logits_bytes = LOGIT_BYTES * host.max_rows * outputs.vocab_size
        with ExitStack() as undo:
            self._sampled = [undo.enter_context(closing(PinnedBuffer(device, outputs.num_bytes))) for _ in range(2)]
            self._logits = undo.enter_context(closing(PinnedBuffer(device, logits_bytes)))
            self._owned = undo.pop_all()

    def enqueue(self, divided: DividedJob, params: RowParams, lane: int) -> None:
        """Copy back what `finish` needs of a step whose rows have `params`."""
        num_rows = divided.job.num_rows
        if not num_rows:
            return
        names = ["token"]
        if divided.num_logprobs:
            names += SAMPLED[1:] if any(num_top for _, num_top in divided.num_logprobs) else ["logprob"]
        for name in names:
            self._device.copy_out(self._array(name, num_rows, lane), self._outputs.address(name))
        if not divided.host_rows:
            return
        self._host.take(params, divided.host_rows)
        self._copy_logits(divided.host_rows[: self._host.max_rows])

    def finish(self, divided: DividedJob, lane: int) -> StepResult:
        """The step's tokens; call it when the device is done. Raises ExecutorError."""
        num_rows = divided.job.num_rows
        if not num_rows:
            return StepResult(token_ids=np.empty(0, np.int32))
        token_ids: Int32Array = self._array("token", num_rows, lane).copy()
        is_failed = token_ids == _NO_TOKEN
        token_ids[is_failed] = 0  # any token will do
        logprobs = self._logprobs(divided, lane) if divided.num_logprobs else {}
        for host_rows, found in self._host_rounds(divided):
            rows = np.array(host_rows)
            token_ids[rows] = found.token_ids
            is_failed[rows] = False
            is_failed[rows[found.failed]] = True
            logprobs |= {host_rows[place]: entry for place, entry in found.logprobs.items()}
        return StepResult(token_ids=token_ids, logprobs=logprobs, failed=np.flatnonzero(is_failed))

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owned.close()

    def _logprobs(self, divided: DividedJob, lane: int) -> dict[int, TokenLogprobs]:
        num_rows = divided.job.num_rows
        chosen = self._array("logprob", num_rows, lane).view(np.float32).tolist()
        top_tokens = self._array("top_tokens", num_rows, lane)
        top_logprobs = self._array("top_logprobs", num_rows, lane).view(np.float32)
        return {
            row: TokenLogprobs(chosen[row], top_tokens[row, :num_top].copy(), top_logprobs[row, :num_top].copy())
            for row, num_top in divided.num_logprobs
        }

    def _array(self, name: str, num_rows: int, lane: int) -> Int32Array:
        """Rows of one of SAMPLED, on the host."""
        shape = (num_rows, self._outputs.max_top) if name.startswith("top_") else (num_rows,)
        return self._sampled[lane].view(shape, np.int32, self._outputs.offsets[name])

    def _host_rounds(self, divided: DividedJob) -> Iterator[tuple[tuple[int, ...], StepResult]]:
        """The rows that the host samples, a round's at a time, with what comes of them by their places in it."""
        num_rows = self._host.max_rows
        for start in range(0, len(divided.host_rows), num_rows):
            rows = divided.host_rows[start : start + num_rows]
            if start:  # the first round's are here
                self._copy_logits(rows)
                self._device.wait()
            yield rows, self._host.finish(divided.job, start, rows, self._host_logits(len(rows)))

    def _copy_logits(self, rows: Sequence[int]) -> None:
        row_bytes = LOGIT_BYTES * self._outputs.vocab_size
        for target, row in zip(self._host_logits(len(rows)), rows, strict=True):
            self._device.copy_out(target, self._outputs.logits + row * row_bytes)

    def _host_logits(self, num_rows: int) -> HalfArray:
        return self._logits.view((num_rows, self._outputs.vocab_size), self._outputs.logit_dtype)


class HostSampler:
    """The CPU executor's sampling, over rows of logits that were copied back and are widened. Engine thread."""

    def __init__(self, options: ort.SessionOptions, shape: tuple[int, int], logit_dtype: npt.DTypeLike) -> None:
        """For `shape` [max_num_seqs, vocab_size] logits, which the device keeps in `logit_dtype`."""
        self.max_rows = min(shape[0], _HOST_ROWS)  # of a round
        self._logit_dtype = logit_dtype
        self._logits: Float32Array = aligned_zeros((self.max_rows, shape[1]), np.float32)
        self._sampler = Sampler(self.max_rows)
        self._taken = self._sampler.params  # of all rows that the host samples
        self._session = SampleRowsSession(options, self._logits, self._sampler.params)

    def take(self, params: RowParams, rows: Sequence[int]) -> None:
        """Keep the parameters of `rows`, which the next step's replace."""
        self._taken = RowParams(*(getattr(params, name)[list(rows)] for name in RowParams.__slots__))

    def finish(self, job: SamplingJob, start: int, rows: Sequence[int], logits: HalfArray) -> StepResult:
        """Sample `logits` of `rows`, taken from place `start` on; the result's indices are places in `rows`."""
        ours = self._sampler.params.prefix(len(rows))
        for name in RowParams.__slots__:
            getattr(ours, name)[:] = getattr(self._taken, name)[start : start + len(rows)]
        wide = self._logits[: len(rows)]
        wide[:] = logits
        place_of = {row: place for place, row in enumerate(rows)}
        edits = {place_of[row]: edit for row, edit in job.edits.items() if row in place_of}
        num_logprobs = {place_of[row]: num_top for row, num_top in job.num_logprobs.items() if row in place_of}
        return self._sampler.finish(SamplingJob(len(rows), edits, num_logprobs), wide, self)

    def sample(self, num_rows: int) -> Int32Array:
        """See RowSampler. Edited logits are rounded first, as they are where the device keeps them."""
        wide = self._logits[:num_rows]
        with np.errstate(over="ignore"):
            wide[:] = wide.astype(self._logit_dtype)
        return self._session.sample(num_rows)

    def close(self) -> None:
        """Free the session. Idempotent."""
        self._session.close()
