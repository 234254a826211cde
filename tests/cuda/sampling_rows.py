"""Rows to sample from, and the kernel's answer on the simulator."""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from graphs.op_twins_rows import sample_rows
from service.executor.cuda.kernels import (
    SAMPLE_KERNELS,
    SLICE_LOGITS,
    KernelConfig,
    Scalar,
    sample_workspace_words,
)
from service.executor.logit_edits import LogitEdit
from tests.cuda.sim_kernels import Out, SimKernels
from tests.cudasim.device import SimDevice

LOGITS = {"float": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "half": np.dtype(np.float16)}
EDIT_FIELDS = (("tokens", np.int32), ("counts", np.int32), ("biases", np.float32))


@dataclass
class Rows:
    """Logits and one entry of everything else for each row."""

    logits: np.ndarray  # [num_rows, vocab_size]
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray
    edits: dict[int, LogitEdit] = field(default_factory=dict)
    masks: dict[int, np.ndarray] = field(default_factory=dict)  # row -> bool [vocab_size]
    num_logprobs: np.ndarray | None = None

    @classmethod
    def of(cls, logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
        """Numbers are spread over all rows."""
        num_rows = len(logits)

        def column(values, dtype):
            return np.broadcast_to(np.asarray(values, dtype), (num_rows,)).copy()

        return cls(
            logits,
            column(temperature, np.float32),
            column(top_k, np.int32),
            column(top_p, np.float32),
            column(min_p, np.float32),
            column(seed, np.int64),
            column(position, np.int32),
        )

    @property
    def columns(self):
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.position)

    def expected_tokens(self):
        """The numpy twin's, of logits that were edited and masked before."""
        return sample_rows(self.changed_logits(), *self.columns)

    def changed_logits(self):
        """float32: what edits and masks make of the logits."""
        logits = self.logits.astype(np.float32)
        for row, edit in self.edits.items():
            edit.apply(logits[row])
        for row, mask in self.masks.items():
            logits[row, ~mask] = -np.inf
        return logits


@dataclass
class Sampled:
    tokens: np.ndarray
    logits: np.ndarray  # as the kernel leaves them
    logprob: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


def run_sample_rows(rows, device=None, workspace=None, num_blocks=1 << 30):
    """Launch the kernels on a copy of the logits; outputs begin as NaN or -7."""
    launches = SampleLaunches(rows, device, workspace, num_blocks)
    for name in SAMPLE_KERNELS:
        launches.launch(name)
    return launches.sampled


class SampleLaunches:
    """The kernels one by one. `sampled` holds what they have left so far, and what the next one finds."""

    def __init__(self, rows, device=None, workspace=None, num_blocks=1 << 30):
        num_rows, vocab_size = rows.logits.shape
        name = next(name for name, dtype in LOGITS.items() if dtype == rows.logits.dtype)
        self._kernels = SimKernels(KernelConfig(Scalar.BF16, 64, 16, 64, Scalar(name)), device or SimDevice(seed=2))
        max_top = 0 if rows.num_logprobs is None else max(1, int(rows.num_logprobs.max()))
        self.sampled = sampled = _nothing_sampled(rows, max_top)
        if workspace is None:
            workspace = sample_workspace(num_rows, vocab_size, max_top)
        has_logprobs = rows.num_logprobs is not None
        self._sizes = (*rows.logits.shape, num_blocks)
        self._arguments = [
            Out(sampled.logits),
            *rows.columns,
            *_edit_arguments(rows),
            *_mask_arguments(rows),
            rows.num_logprobs,
            Out(sampled.tokens),
            Out(sampled.logprob),
            Out(sampled.top_tokens) if has_logprobs else None,
            Out(sampled.top_logprobs) if has_logprobs else None,
            Out(workspace),
            vocab_size,
            max_top,
        ]

    def launch(self, name):
        self._kernels.launch(name, sample_grid(name, *self._sizes), *self._arguments)


def _nothing_sampled(rows, max_top):
    num_rows = len(rows.logits)
    return Sampled(
        np.full(num_rows, -7, np.int32),
        rows.logits.copy(),
        np.full(num_rows, np.nan, np.float32),
        np.full((num_rows, max_top), -7, np.int32),
        np.full((num_rows, max_top), np.nan, np.float32),
    )


def sample_grid(kernel, num_rows, vocab_size, num_blocks=1 << 30):
    """As the op launches it where the device holds `num_blocks`."""
    num_slices = -(-vocab_size // SLICE_LOGITS)
    slices_each = min(max(-(-num_rows * num_slices // num_blocks), 1), 4)
    return (num_rows, 1) if kernel == "sample_draw" else (num_rows, -(-num_slices // slices_each))


def sample_workspace(num_rows, vocab_size, max_top):
    """Of no use before the first kernel has run."""
    return np.full(sample_workspace_words(num_rows, vocab_size, max_top), 0xFFFFFFFF, np.uint32)


def _edit_arguments(rows):
    if not rows.edits:
        return [None] * 6
    penalties = np.tile(np.array([1, 0, 0], np.float32), (len(rows.logits), 1))
    indptr, entries = [0], []
    for row in range(len(rows.logits)):
        if row in rows.edits:
            params = rows.edits[row].params
            penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            entries += edit_entries(rows.edits[row])
        indptr.append(len(entries))
    columns = [np.array([entry[i] for entry in entries], dtype) for i, (_, dtype) in enumerate(EDIT_FIELDS)]
    return [penalties, np.array(indptr, np.int32), *columns, Out(np.full(len(entries), np.nan, np.float32))]


def edit_entries(edit):
    """(token, count, bias), each token once."""
    counts = dict(zip(edit.seen.tolist(), edit.num_uses.tolist(), strict=True))
    biases = dict(edit.params.logit_bias)
    banned = set(edit.banned_token_ids.tolist())
    return [
        (token, counts.get(token, -1), -np.inf if token in banned else biases.get(token, 0.0))
        for token in sorted(counts.keys() | biases.keys() | banned)
    ]


def _mask_arguments(rows):
    if not rows.masks:
        return [None, None]
    mask_rows = np.full(len(rows.logits), -1, np.int32)
    words = np.zeros((len(rows.masks), -(-rows.logits.shape[1] // 32)), np.uint32)
    for i, (row, mask) in enumerate(rows.masks.items()):
        mask_rows[row] = i
        packed = np.packbits(mask, bitorder="little")
        words[i].view(np.uint8)[: len(packed)] = packed
    return [mask_rows, words]
