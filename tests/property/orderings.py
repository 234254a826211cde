"""Ordering policies for the scheduler's state machine."""

from hypothesis import strategies as st

from service.core.scheduler_config import OrderingConfig

AGING_NS = 1_000


@st.composite
def orderings(draw: st.DrawFn) -> OrderingConfig:
    """Small windows and few skips, so that doors are held; tenants that go are soon forgotten."""
    return OrderingConfig(
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority", "fair"])),
        aging_ns=AGING_NS,
        tenant_weights=(("tenant 1", 3.0),),
        max_idle_tenants=draw(st.sampled_from([0, 1, 9])),
        skip_window=draw(st.sampled_from([0, 2])),
        max_skips=draw(st.sampled_from([0, 1, 3])),
    )
