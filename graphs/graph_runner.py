"""Runs exported graphs step by step over a paged KV buffer: the smallest caller that the graphs' inputs allow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from graphs.decoder import GraphKind
from graphs.manifest import DECODE_NAME, PREFILL_NAME
from graphs.ops import library_path
from graphs.rope import Float32Array
from graphs.spec import ModelSpec

BLOCK_SIZE: Final = 16  # token positions of one KV block
_NUM_THREADS: Final = 2
_WORKSPACE_FLOATS: Final = 1 << 20
_FILES: Final[dict[GraphKind, str]] = {"prefill": PREFILL_NAME, "decode": DECODE_NAME}


@dataclass(slots=True)
class PagedSequence:
    """One sequence: the KV blocks it owns and how many tokens they hold."""

    blocks: list[int]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one step computes of one sequence."""

    sequence: PagedSequence
    token_ids: list[int]


class GraphRunner:
    """Holds the KV buffer of one model folder, and the session of the graph that ran last. One thread."""

    def __init__(self, folder: Path, spec: ModelSpec, num_blocks: int) -> None:
        """Allocate a KV buffer of `num_blocks`. Raises FileNotFoundError without a built op library."""
        self._folder = folder
        self._library = library_path()
        self._session: tuple[GraphKind, ort.InferenceSession] | None = None
        shape = (num_blocks, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        # Stale content must not matter, so it starts as what would spoil every sum.
        self._kv = {f"kv_cache.{index}": np.full(shape, np.nan, np.float32) for index in range(spec.num_layers)}
        self._workspace = np.zeros(_WORKSPACE_FLOATS, np.float32)

    def use(self, kind: GraphKind, session: ort.InferenceSession) -> None:
        """Run steps of `kind` on `session` until another kind is asked for."""
        self._session = kind, session

    def run(self, kind: GraphKind, chunks: list[Chunk], logit_indices: list[int] | None = None) -> Float32Array:
        """One step over `chunks`, whose tokens lie one after the other; the sequences advance.

        Yields logits [num_logits, vocab_size] of the rows `logit_indices`, which only "prefill" takes, or of all rows.
        """
        feeds = _step_feeds(chunks)
        if kind == "prefill":
            rows = range(len(feeds["token_ids"])) if logit_indices is None else logit_indices
            feeds["logit_indices"] = np.array(rows, dtype=np.int32)
        session = self._session_of(kind)
        binding = session.io_binding()
        for name, array in {**feeds, **self._kv, "workspace": self._workspace}.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        for chunk in chunks:
            chunk.sequence.num_tokens += len(chunk.token_ids)
        logits: Float32Array = binding.copy_outputs_to_cpu()[0]
        return logits

    def _session_of(self, kind: GraphKind) -> ort.InferenceSession:
        if self._session is None or self._session[0] != kind:
            self._session = None  # so that one graph's weights at a time are in memory
            self._session = kind, load_session(self._folder, _FILES[kind], self._library)
        return self._session[1]


def _step_feeds(chunks: list[Chunk]) -> dict[str, NDArray[np.int32]]:
    lengths = [len(chunk.token_ids) for chunk in chunks]
    positions = [
        np.arange(chunk.sequence.num_tokens, chunk.sequence.num_tokens + length)
        for chunk, length in zip(chunks, lengths, strict=True)
    ]
    width = max(len(chunk.sequence.blocks) for chunk in chunks)
    block_table = np.zeros((len(chunks), width), np.int32)
    for row, chunk in zip(block_table, chunks, strict=True):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    slots = [
        row[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in zip(block_table, positions, strict=True)
    ]
    return {
        "token_ids": np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32),
        "positions": np.concatenate(positions).astype(np.int32),
        "slot_mapping": np.concatenate(slots).astype(np.int32),
        "cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32),
        "context_lens": np.array([position[-1] + 1 for position in positions], np.int32),
        "block_table": block_table,
    }


def load_session(folder: Path, name: str, library: Path) -> ort.InferenceSession:
    """A CPU session of one graph."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    options.intra_op_num_threads = _NUM_THREADS
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
