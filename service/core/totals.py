"""What the scheduler counts from the start on."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from service.core.reservation import Admission
from service.core.sequence import SequenceStatus


class Totals(NamedTuple):
    """Sums since the start. A value: whoever counts replaces it, whoever reads keeps it."""

    num_submitted: int = 0  # refused ones not included
    num_finished: int = 0  # cancelled ones included
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # that were computed before a preemption, and again after it
    num_queried_tokens: int = 0  # of prompts, looked up in the prefix cache
    num_hit_tokens: int = 0  # of them, found
    num_restored_blocks: int = 0  # of found blocks, also of preempted sequences: copied from host memory

    @property
    def uncached_share(self) -> float:
        """Of the prompt tokens admitted so far, those that the prefix cache did not have; 1 at the start."""
        return 1 - self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 1.0

    def with_admissions(self, admissions: Iterable[Admission]) -> Self:
        """These sums and what a committed step has admitted."""
        num_recomputed_tokens = self.num_recomputed_tokens
        num_queried_tokens, num_hit_tokens = self.num_queried_tokens, self.num_hit_tokens
        num_restored_blocks = self.num_restored_blocks
        for sequence, status, _, _, hit in admissions:
            if hit.num_tokens:
                num_restored_blocks += len(hit.host_blocks)
            if sequence.num_preemptions:
                num_recomputed_tokens += max(0, sequence.num_computed_tokens - hit.num_tokens)
            if status is SequenceStatus.WAITING:
                num_queried_tokens += sequence.num_tokens
                num_hit_tokens += hit.num_tokens
        return self._replace(
            num_recomputed_tokens=num_recomputed_tokens,
            num_queried_tokens=num_queried_tokens,
            num_hit_tokens=num_hit_tokens,
            num_restored_blocks=num_restored_blocks,
        )
