"""Which tokens a sequence holds, and how often its output does: what penalties go by."""

from typing import Final

import numpy as np

from service.core.types import Int32Array

_MAX_APPENDED: Final = 16  # tokens that are added one by one; more are counted all together


class SeenTokens:
    """The different tokens of one sequence, kept up as it grows. Owned by the engine thread."""

    def __init__(self) -> None:
        self._tokens: Int32Array = np.empty(0, np.int32)  # with room behind the ones that are there
        self._num_uses: Int32Array = np.empty(0, np.int32)
        self._num_seen = 0
        self._num_counted = 0  # tokens of the sequence

    @property
    def tokens(self) -> Int32Array:
        """A copy: [num_seen], each once, in any order."""
        return self._tokens[: self._num_seen].copy()

    @property
    def num_uses(self) -> Int32Array:
        """A copy: [num_seen] occurrences in the output; 0: it is in the prompt alone."""
        return self._num_uses[: self._num_seen].copy()

    def update(self, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        """Follow the sequence to `token_ids`, its prompt and its output, which begin with what was given before."""
        num_new = len(token_ids) - self._num_counted
        if self._num_counted == 0 or not 0 <= num_new <= _MAX_APPENDED:
            self._count(token_ids, num_prompt_tokens)
        else:
            for token_id in token_ids[self._num_counted :].tolist():
                self._append(token_id)
        self._num_counted = len(token_ids)

    def _count(self, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        tokens = np.unique(token_ids)
        self._num_seen = len(tokens)
        self._tokens = np.resize(tokens, self._num_seen + _MAX_APPENDED)
        self._num_uses = np.zeros(len(self._tokens), np.int32)
        used, counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        self._num_uses[np.searchsorted(tokens, used)] = counts

    def _append(self, token_id: int) -> None:
        """One more token of the output."""
        found = np.flatnonzero(self._tokens[: self._num_seen] == token_id)
        if len(found):
            self._num_uses[found[0]] += 1
            return
        if self._num_seen == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self._num_seen)
            self._num_uses = np.resize(self._num_uses, 2 * self._num_seen)
        self._tokens[self._num_seen] = token_id
        self._num_uses[self._num_seen] = 1
        self._num_seen += 1
