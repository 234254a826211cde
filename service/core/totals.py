"""What the scheduler counts from the start on."""

from collections.abc import Iterable
from dataclasses import dataclass

from service.core.reservation import Admission
from service.core.sequence import SequenceStatus


@dataclass(slots=True)
class Totals:
    """Sums since the start. Owned by the Scheduler."""

    num_submitted: int = 0  # refused ones not included
    num_finished: int = 0  # cancelled ones included
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # that were computed before a preemption, and again after it
    num_queried_tokens: int = 0  # of prompts, looked up in the prefix cache
    num_hit_tokens: int = 0  # of them, found

    @property
    def uncached_share(self) -> float:
        """Of the prompt tokens admitted so far, those that the prefix cache did not have; 1 at the start."""
        return 1 - self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 1.0

    def count_admissions(self, admissions: Iterable[Admission]) -> dict[int, int]:
        """Count what a committed step has admitted. Returns `StepDelta.cached_prompt_tokens`."""
        cached: dict[int, int] = {}
        for admission in admissions:
            sequence = admission.sequence
            self.num_recomputed_tokens += max(0, sequence.num_computed_tokens - admission.num_cached_tokens)
            if admission.status is SequenceStatus.WAITING:
                self.num_queried_tokens += sequence.num_tokens
                self.num_hit_tokens += admission.num_cached_tokens
                if admission.num_cached_tokens:
                    cached[sequence.seq_id] = admission.num_cached_tokens
        return cached
