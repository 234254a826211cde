"""How long a step takes: a model of few numbers, from a file, from measurements, or shipped."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from service.errors import ConfigError

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepLatency:
    """overhead + max(weights, prefill tokens * P + decode rows * D) + context tokens * C, in nanoseconds.

    Context tokens are those whose K and V the step's attention reads: each row's computed ones. `weights_ns` is the
    time to read the weights once, which hides the arithmetic of a small step; without it the model is linear.
    """

    overhead_ns: float
    prefill_token_ns: float
    decode_row_ns: float
    context_token_ns: float
    weights_ns: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a number that is negative or none, and when a step would take no time."""
        for name, value in asdict(self).items():
            if not 0 <= value < 1e15:
                raise ConfigError(f"{name} is {value}, but must be nanoseconds of at least 0")
        if self.overhead_ns + self.weights_ns < 1 and (self.prefill_token_ns < 1 or self.decode_row_ns < 1):
            raise ConfigError(
                "a step takes no time: overhead_ns, or both prefill_token_ns and decode_row_ns, must be 1"
            )

    def step_ns(self, prefill_tokens: int, decode_rows: int, context_tokens: int) -> int:
        """The duration of a step."""
        arithmetic_ns = prefill_tokens * self.prefill_token_ns + decode_rows * self.decode_row_ns
        attention_ns = context_tokens * self.context_token_ns
        return round(self.overhead_ns + max(self.weights_ns, arithmetic_ns) + attention_ns)


_H200_BYTES_PER_NS: Final = 4800 * 0.8  # 4.8 TB/s of HBM3e, of which large reads get four fifths
_H200_FLOP_PER_NS: Final = 650e3  # dense bf16, of 989 TFLOP/s on the data sheet: what large GEMMs are seen to reach
_MODEL_PARAMETERS: Final = 8.03e9
_KV_TOKEN_BYTES: Final = 2 * 32 * 8 * 128 * 2  # K and V, 32 layers, 8 heads of 128, bf16
_TOKEN_NS: Final = 2 * _MODEL_PARAMETERS / _H200_FLOP_PER_NS  # a multiplication and an addition for each parameter

H200_LIKE: Final = StepLatency(
    overhead_ns=300e3,  # scheduling, graph launch, sampling
    weights_ns=2 * _MODEL_PARAMETERS / _H200_BYTES_PER_NS,
    prefill_token_ns=_TOKEN_NS,
    decode_row_ns=_TOKEN_NS,
    context_token_ns=_KV_TOKEN_BYTES / _H200_BYTES_PER_NS,
)
"""An 8B Llama in bf16 on one H200, derived, not measured: weights 4.18 ms, a token 24.7 us, a context token 34 ns.

Attention counts as reading K and V once; a long prompt's own attention arithmetic, a tenth of its GEMMs at 4,000
tokens, is left out. Of 141 GB the weights take 16 and activations some, which leaves about 110 GB: 840,000 tokens.
"""
H200_NUM_BLOCKS: Final = 52_000
H200_HOST_BLOCKS: Final = 200_000  # of 16 tokens: 420 GB, of the terabyte and more that such machines have
H200_HOST_BLOCK_US: Final = 16 * _KV_TOKEN_BYTES / 50e3  # over PCIe 5 with 16 lanes, which large copies fill to 50 GB/s

PROFILES: Final[Mapping[str, StepLatency]] = {"h200-like": H200_LIKE}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step, or the median of several alike."""

    prefill_tokens: int
    decode_rows: int
    context_tokens: int
    step_ns: float


def load_latency(source: str) -> StepLatency:
    """The profile of that name, or a JSON file: an object of StepLatency's fields, or what `bench step --json` printed.

    Raises ConfigError, OSError when there is no such file.
    """
    if source in PROFILES:
        return PROFILES[source]
    path = Path(source)
    try:
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: no such file, and no profile; profiles: {', '.join(PROFILES)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: no JSON: {error}") from error
    if isinstance(document, list):
        return fit_latency([_measured_step(entry, source) for entry in document])
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must be an object of step times, or a list of measured steps")
    try:
        return _step_latency(document)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _step_latency(document: Mapping[str, object]) -> StepLatency:
    """Raises ConfigError."""
    known = {field.name: field.default is MISSING for field in fields(StepLatency)}
    if unknown := [name for name in document if name not in known]:
        raise ConfigError(f"{', '.join(unknown)}: no step times; those are {', '.join(known)}")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in document]:
        raise ConfigError(f"lacks {', '.join(missing)}")
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {json.dumps(value)}, but must be a number of nanoseconds")
    return StepLatency(**document)  # type: ignore[arg-type]  # all are numbers


def fit_latency(steps: Sequence[MeasuredStep]) -> StepLatency:
    """The linear model with the least squared relative error over `steps`; no cost is negative.

    Costs that the steps say nothing about: without a prefill token among them a prefill token costs what a decode row
    costs, which both multiply the weights with one row. Raises ConfigError for fewer than two steps.
    """
    if len(steps) < 2:
        raise ConfigError(f"{len(steps)} measured step is too few to fit step times: at least 2")
    has_prefill = any(step.prefill_tokens for step in steps)
    table = np.array([(1, step.prefill_tokens, step.decode_rows, step.context_tokens) for step in steps], np.float64)
    times_ns = np.array([step.step_ns for step in steps])
    overhead, prefill, decode, context = _least_squares(table / times_ns[:, None]).tolist()
    return StepLatency(overhead, prefill if has_prefill else decode, decode, context)


def _least_squares(table: Float64Array) -> Float64Array:
    """The x >= 0 that brings `table` @ x closest to all ones. Leaves out the most negative column until none is."""
    solution = np.zeros(table.shape[1])
    columns = np.flatnonzero(table.any(axis=0))
    while len(columns):
        scale = np.linalg.norm(table[:, columns], axis=0)
        found = np.linalg.lstsq(table[:, columns] / scale, np.ones(len(table)), rcond=None)[0] / scale
        if (found >= 0).all():
            solution[columns] = found
            break
        columns = np.delete(columns, np.argmin(found * scale))
    return solution


def _measured_step(entry: object, source: str) -> MeasuredStep:
    """A case of `bench step --json`: `batch` rows of `context` tokens each; `prefill_tokens` may come with it."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{source}: {entry!r} is no measured step: must be an object")
    try:
        batch, context = int(entry["batch"]), int(entry["context"])
        step_ns = float(entry["step_ms"]) * 1e6
        prefill_tokens = int(entry.get("prefill_tokens", 0))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: {entry!r} is no measured step: needs batch, context and step_ms") from error
    has_counts = all(0 <= count < 1 << 31 for count in (batch, context, prefill_tokens))
    if not has_counts or not 0 < step_ns < 1e15:
        raise ConfigError(f"{source}: {entry!r} is no measured step: a number is out of range")
    return MeasuredStep(prefill_tokens, batch, batch * context, step_ns)
