"""Edits of logits from a sequence's tokens, counted one by one."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from service.core.types import SamplingParams
from service.executor.logit_edits import LogitEdit


def edit_of(
    params: SamplingParams, tokens: Sequence[int] = (), num_prompt_tokens: int = 0, banned: Sequence[int] = ()
) -> LogitEdit:
    """Of a prompt and the output behind it."""
    uses = Counter(dict.fromkeys(tokens, 0))
    uses.update(tokens[num_prompt_tokens:])
    arrays = (np.array(list(values), np.int32) for values in (uses.keys(), uses.values(), banned))
    return LogitEdit(params, *arrays)
