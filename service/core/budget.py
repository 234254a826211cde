"""How many tokens a step may compute, and how fast recent steps computed them."""

import math

from service.core.roster import Roster
from service.core.scheduler_config import SchedulerConfig
from service.core.step_time import StepLoad, StepTimeModel

_HORIZON_S = 10.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_UNKNOWN_RETRY_S = 1.0


class ChunkBudget:
    """Shares a step's tokens: every decode row gets its one token first, chunks share what is left.

    `max_chunk_tokens` bounds the prompt tokens of one step, all its chunks together; 0 sets no bound of its own.

    With a target for the time between the tokens of a stream, chunks fill the time that decoding leaves of it, as the
    step-time model says and less its usual error. Prompts always get `prefill_share` of the target, and a token at
    least, so that decoding cannot starve them; what is copied back from host memory for them takes of that time, too.
    Copies out do not: they have a budget of their own. No chunk is more than twice as large as any that was measured
    lately, or than a block: what a far larger one would take, the model cannot know.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        self._config = config
        self._step_time = step_time

    def chunk_tokens(self, roster: Roster, copying_ns: float = 0.0) -> int:
        """Prompt tokens that a step of these rows, which restores blocks for `copying_ns`, may compute."""
        config, num_decode_tokens = self._config, len(roster.decode_rows)
        num_tokens = config.max_num_batched_tokens - num_decode_tokens
        if config.max_chunk_tokens:
            num_tokens = min(num_tokens, config.max_chunk_tokens)
        if config.target_itl_ns and num_decode_tokens:  # without decode rows no stream waits for a token
            num_tokens = min(num_tokens, self._tokens_within_target(roster, copying_ns))
        return num_tokens

    def _tokens_within_target(self, roster: Roster, copying_ns: float) -> int:
        model, target_ns, block_size = self._step_time, self._config.target_itl_ns, self._config.block_size
        context_tokens = int(roster.num_computed_tokens[roster.decode_rows].sum())
        in_progress = int(roster.num_computed_tokens[roster.prompt_rows].max(initial=0))
        largest = int(2 * max(model.recent_prefill_tokens, block_size))
        if not model.recent_prefill_tokens:
            return largest
        with_prompt = StepLoad(1, len(roster.decode_rows), context_tokens)
        taken_ns = model.predict_ns(with_prompt) + model.spread_ns(with_prompt)
        free_ns = max(target_ns - taken_ns, self._config.prefill_share * target_ns)
        return max(1, int(min(model.chunk_for(free_ns - copying_ns, in_progress), largest)))


class TokenRate:
    """Prompt tokens computed per second: how fast the queue drains. Owned by the StepTimer.

    Smoothed over the last ten seconds or so of steps, those without a prompt included. Zero until the first prompt.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def observe(self, num_tokens: int, elapsed_ns: int) -> None:
        """A step of `num_tokens` took `elapsed_ns`."""
        if elapsed_ns <= 0:
            return
        measured = num_tokens * 1e9 / elapsed_ns
        if self.tokens_per_s == 0.0:
            self.tokens_per_s = measured
            return
        share = 1.0 - math.exp(-elapsed_ns / (_HORIZON_S * 1e9))
        self.tokens_per_s += share * (measured - self.tokens_per_s)

    def seconds_for(self, num_tokens: float) -> float:
        """A rough time to compute `num_tokens`, between 0.1 and 60 s; 1 s while no step has been measured."""
        if self.tokens_per_s == 0.0:
            return _UNKNOWN_RETRY_S
        return min(max(num_tokens / self.tokens_per_s, _MIN_RETRY_S), _MAX_RETRY_S)
