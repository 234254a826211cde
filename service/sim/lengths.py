"""How long prompts and outputs are."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from service.errors import ConfigError

MAX_LENGTH: Final = 1 << 30

Int64Array = npt.NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        """int64[count], each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same."""

    num_tokens: int

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:  # noqa: ARG002  the others draw
        """int64[count] of `num_tokens`."""
        return np.full(count, self.num_tokens, np.int64)


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Every length from `least` to `most` alike."""

    least: int
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        """int64[count]."""
        return rng.integers(self.least, self.most + 1, count)


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """Rounded exponentials of normal numbers: half are below `median`, `sigma` is the deviation of the logarithm."""

    median: int
    sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        """int64[count], at least 1."""
        values = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(values), 1, MAX_LENGTH).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SeparateLengths:
    """Prompts and outputs drawn independently."""

    prompts: Lengths
    outputs: Lengths

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Int64Array, Int64Array]:
        """Prompt and output tokens of `count` requests."""
        return self.prompts.draw(rng, count), self.outputs.draw(rng, count)


@dataclass(frozen=True, slots=True, eq=False)
class PairedLengths:
    """Prompt and output of recorded requests, drawn together and with replacement."""

    prompt_tokens: Int64Array  # [num_recorded]
    output_tokens: Int64Array  # [num_recorded]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Int64Array, Int64Array]:
        """Prompt and output tokens of `count` requests."""
        chosen = rng.integers(0, len(self.prompt_tokens), count)
        return self.prompt_tokens[chosen], self.output_tokens[chosen]


RequestLengths = SeparateLengths | PairedLengths


def parse_lengths(text: str) -> Lengths:
    """Read `fixed:N`, `uniform:LEAST:MOST` or `lognormal:MEDIAN:SIGMA`. Raises ConfigError."""
    kind, *numbers = text.split(":")
    try:
        match kind, numbers:
            case "fixed", [tokens]:
                return FixedLength(_between(1, int(tokens)))
            case "uniform", [least, most]:
                return UniformLength(_between(1, int(least)), _between(int(least), int(most)))
            case "lognormal", [median, sigma]:
                return LognormalLength(_between(1, int(median)), _spread(float(sigma)))
    except ValueError as error:
        raise ConfigError(f"lengths {text!r}: {error}") from error
    raise ConfigError(f"lengths {text!r}: must be fixed:N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA")


def load_lengths(path: Path) -> PairedLengths:
    """Lengths of the requests in a JSONL file. Raises ConfigError for a line without them, OSError for no file."""
    pairs = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                pairs.append(read_lengths(read_object(line, f"{path}:{number}"), f"{path}:{number}"))
    if not pairs:
        raise ConfigError(f"{path}: holds no request")
    prompt_tokens, output_tokens = np.array(pairs, np.int64).T
    return PairedLengths(prompt_tokens, output_tokens)


def read_object(line: str, where: str) -> dict[str, object]:
    """The JSON object of a line. Raises ConfigError."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: {type(document).__name__} is not an object")
    return document


def read_lengths(fields: dict[str, object], where: str) -> tuple[int, int]:
    """Prompt and output tokens of a recorded request: `prompt_tokens` (or the length of `prompt_token_ids`) and
    `output_tokens` (or `max_tokens`). Raises ConfigError.
    """
    prompt_token_ids = fields.get("prompt_token_ids")
    given = len(prompt_token_ids) if isinstance(prompt_token_ids, list) else None
    values = fields.get("prompt_tokens", given), fields.get("output_tokens", fields.get("max_tokens"))
    for name, value in zip(("prompt_tokens", "output_tokens"), values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
            raise ConfigError(f"{where}: {name} is {value!r}, but must be a whole number from 1 to {MAX_LENGTH:,}")
    prompt_tokens, output_tokens = values
    assert isinstance(prompt_tokens, int) and isinstance(output_tokens, int)
    return prompt_tokens, output_tokens


def _between(least: int, value: int) -> int:
    if not least <= value <= MAX_LENGTH:
        raise ValueError(f"{value} is not between {least} and {MAX_LENGTH:,}")
    return value


def _spread(sigma: float) -> float:
    if not 0 <= sigma <= 10:
        raise ValueError(f"sigma {sigma} is not between 0 and 10")
    return sigma
