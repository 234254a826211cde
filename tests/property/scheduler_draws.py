"""Configurations and requests for the scheduler's state machine."""

from hypothesis import strategies as st

from service.core.scheduler import SchedulerConfig
from service.core.types import SamplingParams
from tests.property.orderings import orderings
from tests.property.toy_model import VOCAB_SIZE


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(6, 20))
    block_size = draw(st.sampled_from([1, 2, 4]))
    # From too small for the longest sequence to room for a few, so that most schedules preempt.
    num_kv_tokens = max_model_len * draw(st.sampled_from([3, 4, 5, 6, 8])) // 4
    batching = draw(st.sampled_from(["continuous", "continuous", "continuous", "static", "dynamic"]))
    prefix_cache = batching == "continuous" and draw(st.sampled_from([True, True, True, False]))
    return SchedulerConfig(
        num_blocks=1 + max(2, -(-num_kv_tokens // block_size)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 10)),
        max_model_len=max_model_len,
        max_waiting_requests=draw(st.sampled_from([9, 3])),
        max_waiting_tokens=draw(st.sampled_from([1000, 20])),
        max_chunk_tokens=draw(st.sampled_from([0, 0, 1, 5])),
        watermark_fraction=draw(st.sampled_from([0.0, 0.0, 0.3])),
        ordering=draw(orderings()),
        batching=batching,
        batch_window_ns=draw(st.sampled_from([20_000, 3_000_000, 50_000_000])) if batching == "dynamic" else 0,
        prefix_cache=prefix_cache,
        # From fewer than a plan evicts to more than are ever filled.
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 4, 7, 40])) if prefix_cache else 0,
        host_block_ns=draw(st.sampled_from([0.0, 0.0, 20_000.0])),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Anything, or one of a few beginnings and a little more, so that sequences share prefixes."""
    ending = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8))
    beginning = draw(st.sampled_from([[], [1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9, 9]]))
    return (beginning + ending[:2]) if beginning else ending


tenants = st.sampled_from(["a", "a", "b", "c"])


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(st.integers(1, 16)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=2))),
    )
