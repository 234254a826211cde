"""How prompts in progress share the tokens of a step."""

from operator import itemgetter
from typing import Final

_BY_TURN: Final = itemgetter(1)

_Prompt = tuple[int, int, int, int, bool]
"""What `join` was given."""


class Chunks:
    """The chunks of one step. Prompts `join`, then `share` gives out tokens and blocks in the order of their turns.

    A prompt's turn is the step in which it would be computed had it been alone since it was admitted, at as many tokens
    a step as this one has. So a short prompt passes a long one in progress, as shortest remaining first would let it
    (Schrage 1968), but only those do that come before the long one's turn, and nobody waits for ever. Equal turns are
    taken in the order of joining.
    """

    def __init__(self, block_size: int, num_tokens: int, num_blocks_left: int) -> None:
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.num_blocks: list[int] = []  # that each takes anew
        self._block_size = block_size
        self._num_tokens_left = num_tokens
        self._num_blocks_left = num_blocks_left
        self._prompts: list[_Prompt] = []
        self._num_wanted = 0

    def count_out(self, num_blocks: int) -> None:
        """Count out free blocks that an admitted prefix holds now: evictable ones, and such as are restored."""
        self._num_blocks_left -= num_blocks

    def turn(self, step_id: int, num_wanted: int) -> int:
        """The turn of a prompt that was admitted in `step_id` and had `num_wanted` tokens to compute then."""
        return step_id - (-num_wanted // max(self._num_tokens_left, 1))

    def has_tokens_at(self, turn: int) -> bool:
        """Whether a prompt that joins now with this turn gets a token, and leaves one to each that joined as new."""
        if self._num_wanted < self._num_tokens_left:
            return True
        return self._num_wanted_before(turn) < self._num_tokens_left

    def lower(self, num_tokens: int, turn: int) -> None:
        """Let no more than `num_tokens` be given out, but one to a prompt that joins now with this turn."""
        self._num_tokens_left = min(self._num_tokens_left, max(num_tokens, self._num_wanted_before(turn) + 1))

    def join(self, row: int, turn: int, num_wanted: int, num_slots: int, *, is_new: bool) -> None:
        """Let a row take part that has `num_wanted` tokens left. A new one was admitted in this step, and must get one.

        Its blocks have `num_slots` unused slots; fewer than none when the first new one begins with copied tokens.
        """
        self._prompts.append((row, turn, num_wanted, num_slots, is_new))
        self._num_wanted += num_wanted

    def _num_wanted_before(self, turn: int) -> int:
        """Tokens wanted by prompts that go before one that joins now with this turn, or joined as new."""
        return sum(num_wanted for _, own_turn, num_wanted, _, is_new in self._prompts if is_new or own_turn <= turn)

    def share(self) -> None:
        """Choose every prompt's chunk: as much as tokens and blocks are left for."""
        for row, _, num_wanted, num_slots, _ in sorted(self._prompts, key=_BY_TURN):
            room = num_slots + self._num_blocks_left * self._block_size
            num_tokens = min(num_wanted, self._num_tokens_left, room)
            if num_tokens <= 0:
                continue
            num_blocks = max(0, -((num_slots - num_tokens) // self._block_size))
            self.rows.append(row)
            self.num_tokens.append(num_tokens)
            self.num_blocks.append(num_blocks)
            self._num_tokens_left -= num_tokens
            self._num_blocks_left -= num_blocks
