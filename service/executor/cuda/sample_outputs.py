"""Where forward passes leave logits and what was sampled from them: on the device, at addresses that never change."""

from contextlib import ExitStack, closing
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from service.executor.cuda.device import Device
from service.executor.cuda.kernels import sample_workspace_words
from service.executor.cuda.launch import BFLOAT16, FLOAT16
from service.executor.cuda.memory import DeviceBuffer, placed

LOGIT_BYTES: Final = 2
SAMPLED: Final = ("token", "logprob", "top_tokens", "top_logprobs")
"""By the names of cuda/README.md; rows of `token` and `logprob` have one entry, the others' `max_top`."""

_DTYPES: Final = {FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16}


class SampleOutputs:
    """Device memory for the rows of one step. Owned by the engine thread."""

    def __init__(self, device: Device, shape: tuple[int, int], max_top: int, scalar_type: int) -> None:
        """`shape` [max_num_seqs, vocab_size] is of the logits, `scalar_type` theirs, FLOAT16 or BFLOAT16.

        Raises ConfigError when memory is lacking.
        """
        max_rows, self.vocab_size = shape
        self.max_top = max_top
        self.logit_dtype: npt.DTypeLike = _DTYPES[scalar_type]
        widths = {name: max_top if name.startswith("top_") else 1 for name in SAMPLED}
        sizes: dict[str, tuple[int, npt.DTypeLike]] = {
            name: (max_rows * width, np.int32) for name, width in widths.items()
        }
        self.offsets, self.num_bytes = placed(sizes)  # of what was sampled
        with ExitStack() as undo:
            self._logits = undo.enter_context(closing(DeviceBuffer(device, LOGIT_BYTES * max_rows * self.vocab_size)))
            self._sampled = undo.enter_context(closing(DeviceBuffer(device, self.num_bytes)))
            num_words = sample_workspace_words(max_rows, self.vocab_size, max_top)
            self._workspace = undo.enter_context(closing(DeviceBuffer(device, 4 * num_words)))
            self._owned = undo.pop_all()

    @property
    def logits(self) -> int:
        """The address of the logits."""
        return self._logits.address

    @property
    def workspace(self) -> int:
        """The address of what sampling leaves between its kernels."""
        return self._workspace.address

    def address(self, name: str) -> int:
        """Where one of SAMPLED lies."""
        return self._sampled.address + self.offsets[name]

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._owned.close()
