"""Compares exported graphs with the reference model on a short text: the last step of every export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from graphs.errors import ExportError
from graphs.graph_runner import BLOCK_SIZE, Chunk, GraphRunner, PagedSequence
from graphs.manifest import TOKENIZER_NAME
from graphs.reference import ReferenceModel, log_softmax
from graphs.spec import ModelSpec
from graphs.tensors import TensorSource

# Mean KL divergence that each format must stay below. A graph that is wired wrongly is off by whole nats; rounding of
# the weights costs a sound one about a tenth of its limit or less.
MAX_MEAN_KL: Final = {
    "float32": 1e-6,
    "float16": 1e-3,
    "bfloat16": 5e-3,
    "int8": 0.02,
    "w8a8": 0.05,
    "int4": 0.5,
}

_TEXTS: Final = (
    "The night ferry left the harbour an hour late, and nobody on board seemed to mind. A man with a cello case asked "
    "the steward whether the islands had electric light yet; she laughed and said they had had it for forty years.",
    "def area(width: float, height: float) -> float:\n    return width * height\n\nprint(area(3, 4))  # prints 12",
)
_MAX_TOKENS: Final = 64  # of one text: the reference computes in float64
_NUM_DECODE_STEPS: Final = 6
MIN_CONTEXT_LENGTH: Final = _NUM_DECODE_STEPS + 2  # tokens: a prompt of two chunks comes first


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the graphs' logits are from the reference's, over all compared tokens."""

    num_tokens: int
    max_logit_error: float
    mean_logit_error: float
    top1_agreement: float  # share of tokens, 0 to 1
    mean_kl: float  # nats, reference against graph

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.num_tokens} tokens: logit error max {self.max_logit_error:.2g}, mean {self.mean_logit_error:.2g}; "
            f"top-1 agreement {self.top1_agreement:.1%}; mean KL {self.mean_kl:.2g}"
        )


def verify_export(folder: Path, source: TensorSource, weight_format: str) -> Verification:
    """Run both graphs in `folder` and the reference over `source` on two texts.

    Raises ExportError when the graphs do not run, yield values that are not finite, or differ by more than the
    format's limit.
    """
    spec = source.spec
    sequences = verification_tokens(folder, spec)
    reference = ReferenceModel(source, keeps_layers=False)
    expected = [reference.forward(token_ids) for token_ids in sequences]
    del reference
    try:
        found = run_graphs(folder, spec, sequences)
    except FileNotFoundError as error:
        raise ExportError(f"the graphs cannot be verified: {error}") from error
    except Exception as error:  # ONNX Runtime's exceptions share no base but this
        raise ExportError(f"the exported graphs do not run: {error}") from error
    verification = compare(expected, found)
    limit = MAX_MEAN_KL[weight_format]
    if not verification.mean_kl <= limit:
        raise ExportError(f"the exported graphs differ from the reference (mean KL limit {limit:g}): {verification}")
    return verification


def verification_tokens(folder: Path, spec: ModelSpec) -> list[list[int]]:
    """Token ids of the texts, cut to what the model and the time allow. Raises ExportError when they are too few."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    limit = min(_MAX_TOKENS, spec.context_length)
    sequences = [list(tokenizer.encode(text).ids)[:limit] for text in _TEXTS]
    shortest = min(map(len, sequences))
    if shortest < MIN_CONTEXT_LENGTH:
        raise ExportError(f"the graphs cannot be verified: a text has {shortest} tokens, at least {MIN_CONTEXT_LENGTH}")
    return sequences


def run_graphs(folder: Path, spec: ModelSpec, sequences: list[list[int]]) -> list[dict[int, NDArray[Any]]]:
    """Logits by position of each sequence, in steps that a server takes.

    First a ragged prefill, the first sequence cut in two chunks; then the rest of it, with logits of every other row;
    then decode steps of all sequences together. Blocks of different sequences interleave.
    """
    num_blocks = [-(-len(token_ids) // BLOCK_SIZE) for token_ids in sequences]
    total = 1 + max(num_blocks) * len(sequences)
    runner = GraphRunner(folder, spec, total)
    pages = [
        PagedSequence([total - 1 - (block * len(sequences) + index) for block in range(count)])
        for index, count in enumerate(num_blocks)
    ]
    logits: list[dict[int, NDArray[Any]]] = [{} for _ in sequences]
    prompts = [token_ids[:-_NUM_DECODE_STEPS] for token_ids in sequences]
    cut = len(prompts[0]) // 2
    first = [prompts[0][:cut], *prompts[1:]]
    rows = iter(runner.run("prefill", [Chunk(*pair) for pair in zip(pages, first, strict=True)]))
    for collected, token_ids in zip(logits, first, strict=True):
        collected.update((position, next(rows)) for position in range(len(token_ids)))
    rest = prompts[0][cut:]
    every_other = list(range(0, len(rest), 2))
    rows = iter(runner.run("prefill", [Chunk(pages[0], rest)], every_other))
    logits[0].update((cut + index, next(rows)) for index in every_other)
    for step in range(-_NUM_DECODE_STEPS, 0):
        chunks = [Chunk(page, [token_ids[step]]) for page, token_ids in zip(pages, sequences, strict=True)]
        rows = iter(runner.run("decode", chunks))
        for collected, token_ids in zip(logits, sequences, strict=True):
            collected[len(token_ids) + step] = next(rows)
    return logits


def compare(expected: list[NDArray[Any]], found: list[dict[int, NDArray[Any]]]) -> Verification:
    """Compare logits [num_tokens, vocab_size] of each sequence with those found, by position. Raises ExportError."""
    pairs = [
        (rows[position], logits) for rows, by in zip(expected, found, strict=True) for position, logits in by.items()
    ]
    reference = np.stack([pair[0] for pair in pairs]).astype(np.float64)
    graph = np.stack([pair[1] for pair in pairs]).astype(np.float64)
    if not np.isfinite(graph).all():
        raise ExportError("the exported graphs yield logits that are not finite")
    errors = np.abs(graph - reference)
    log_p, log_q = log_softmax(reference), log_softmax(graph)
    return Verification(
        num_tokens=len(pairs),
        max_logit_error=float(errors.max()),
        mean_logit_error=float(errors.mean()),
        top1_agreement=float(np.mean(reference.argmax(axis=1) == graph.argmax(axis=1))),
        mean_kl=float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=1))),
    )
