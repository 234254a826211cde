"""The rows that a step finds."""

from typing import NamedTuple

from service.core.types import Int32Array


class Roster(NamedTuple):
    """Which rows there are to compute, and how far they are when the step begins: what it does is chosen from that."""

    decode_rows: Int32Array  # that have one token left
    prompt_rows: Int32Array  # that have more left, ascending
    num_computed_tokens: Int32Array  # of every row of the batch
