"""How requests are ordered and steps are filled: the scheduler's settings."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from service.core.scheduler_config import MAX_WEIGHT, MIN_WEIGHT, BatchingMode, OrderingConfig, Policy, SchedulerConfig
from service.engine.client import TENANT_NAME
from service.engine.settings import EngineSettings
from service.errors import ConfigError
from service.executor.api import ExecutorLimits

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class SchedulingSettings(BaseModel):
    """Who goes first, and how long anybody may wait."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: Policy = Field(
        default="fcfs",
        description="order of the queue: fcfs; priority, with aging; fair, by the tokens that tenants were served",
    )
    priority_aging_s: float = Field(
        default=10.0, ge=0.001, le=86_400, description="seconds of waiting that make up for one level of priority"
    )
    tenant_weights: str = Field(
        default="", description="shares under the fair policy, as a=3,b=0.5; 1 for a tenant that is not named"
    )
    output_token_cost: float = Field(
        default=2.0, gt=0, le=1000, description="cost of a generated token under the fair policy; a prompt's costs 1"
    )
    skip_window: int = Field(
        default=8, ge=0, le=1024, description="requests looked at behind one that does not fit the free KV blocks"
    )
    max_skips: int = Field(
        default=16,
        ge=0,
        le=1 << 30,
        description="admissions that may pass and delay a request that does not fit",
    )
    max_queue_wait_s: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="seconds in the queue after which a request is refused; 0: as long as it takes",
    )

    prefix_cache: Literal["on", "off"] = Field(
        default="on",
        description="whether KV blocks are kept for requests that begin with the same tokens; "
        "never with static or dynamic batching",
    )
    shared_prefix_scope: str = Field(
        default="",
        max_length=256,
        description="a name: all tenants share cached blocks under it, and can time each other's prompts; "
        "unset: each tenant has its own",
    )
    target_itl_ms: float = Field(
        default=0.0, ge=0, le=1e6, description="time between a stream's tokens that prompts may not stretch; 0: none"
    )
    max_chunk_tokens: int = Field(
        default=0, ge=0, le=1 << 30, description="prompt tokens of one step, of all prompts together; 0: what fits it"
    )
    prefill_share: float = Field(
        default=0.1, ge=0, lt=1, description="share of the target that prompts get even when decoding leaves none"
    )

    batching: BatchingMode = Field(
        default="continuous",
        description="static, dynamic: a batch starts and ends together, as servers once did; for comparison only",
    )
    batch_window_ms: float = Field(
        default=10.0, ge=0, le=60_000, description="dynamic: how long a batch that is not full waits for more requests"
    )

    @field_validator("tenant_weights")
    @classmethod
    def _is_list_of_shares(cls, text: str) -> str:
        _weights(text)
        return text

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether blocks are kept, and prompts hashed for it."""
        return self.prefix_cache == "on" and self.batching == "continuous"

    def ordering(self) -> OrderingConfig:
        """The scheduler's part."""
        return OrderingConfig(
            policy=self.policy,
            aging_ns=round(self.priority_aging_s * NS_PER_S),
            tenant_weights=_weights(self.tenant_weights),
            output_token_cost=self.output_token_cost,
            skip_window=self.skip_window,
            max_skips=self.max_skips,
        )


def scheduler_config(
    limits: ExecutorLimits, engine: EngineSettings, scheduling: SchedulingSettings | None = None
) -> SchedulerConfig:
    """The scheduler's limits. Its queue also holds preempted sequences, which were admitted long before.

    Raises ConfigError for settings that exclude each other.
    """
    scheduling = scheduling or SchedulingSettings()
    if limits.num_host_blocks and not scheduling.uses_prefix_cache:
        raise ConfigError("host_kv_memory keeps cached prefixes: it needs prefix_cache on and continuous batching")
    return SchedulerConfig(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_waiting_requests=engine.max_waiting_requests + limits.max_num_seqs,
        max_waiting_tokens=engine.max_waiting_tokens + limits.max_num_seqs * limits.max_model_len,
        max_chunk_tokens=scheduling.max_chunk_tokens,
        target_itl_ns=round(scheduling.target_itl_ms * NS_PER_MS),
        prefill_share=scheduling.prefill_share,
        max_queue_wait_ns=round(scheduling.max_queue_wait_s * NS_PER_S),
        ordering=scheduling.ordering(),
        prefix_cache=scheduling.uses_prefix_cache,
        num_host_blocks=limits.num_host_blocks,
        host_block_ns=limits.host_block_ns,
        batching=scheduling.batching,
        batch_window_ns=round(scheduling.batch_window_ms * NS_PER_MS) if scheduling.batching == "dynamic" else 0,
    )


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    """Read `a=3,b=0.5`. Raises ValueError."""
    weights: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, share = item.rpartition("=")
        if not TENANT_NAME.fullmatch(name) or name in weights or not MIN_WEIGHT <= float(share) <= MAX_WEIGHT:
            limit = "TENANT=SHARE, 1 to 64 visible ASCII characters and 1e-6 to 1e6, with each tenant once"
            raise ValueError(f"{item!r} is not {limit}")
        weights[name] = float(share)
    return tuple(weights.items())
