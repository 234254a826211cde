"""Deadlines as rules of the scheduler's state machine."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from service.core.scheduler import Scheduler
from service.core.types import FinishReason, Request
from tests.property.flight_rules import Flight

TIMEOUT_NS = 40_000_000


def deadline_of(seq_id: int, arrival_ns: int) -> int | None:
    """One request in four has a deadline."""
    return arrival_ns + TIMEOUT_NS if seq_id % 4 == 0 else None


class DeadlineRules(RuleBasedStateMachine):
    """Time passes, and what has run out of it ends. The machine that mixes this in has the attributes below."""

    scheduler: Scheduler
    requests: dict[int, Request]
    reasons: dict[int, FinishReason]
    cancelled: set[int]
    flights: list[Flight]

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    @precondition(lambda self: not self.flights)
    @rule(passed_ns=st.sampled_from([1, TIMEOUT_NS // 2, TIMEOUT_NS]))
    def expire(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        live = [seq_id for seq_id in self.requests if seq_id not in self.reasons and seq_id not in self.cancelled]
        expected = set()
        for seq_id in live:
            deadline_ns = self.requests[seq_id].deadline_ns
            if deadline_ns is not None and deadline_ns <= self.now_ns:
                expected.add((seq_id, FinishReason.DEADLINE))
        assert set(self.scheduler.expire(self.now_ns)) == expected
        self.cancelled |= {seq_id for seq_id, _ in expected}
        assert self.scheduler.expire(self.now_ns) == []
