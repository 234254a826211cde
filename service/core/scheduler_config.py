"""The scheduler's limits."""

from dataclasses import dataclass
from typing import Literal

from service.errors import ConfigError

Policy = Literal["fcfs", "priority", "fair"]
BatchingMode = Literal["continuous", "static", "dynamic"]
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  # of a tenant, and of a token: the cheapest still shows in a counter
MAX_KV_SLOTS = (1 << 31) - 1  # token positions of the KV buffer


@dataclass(frozen=True, slots=True)
class OrderingConfig:
    """Which policy orders the queue, and what it needs to know. Raises ConfigError for a value out of range."""

    policy: Policy = "fcfs"
    aging_ns: int = 10_000_000_000  # priority: time in the queue that makes up for one level
    tenant_weights: tuple[tuple[str, float], ...] = ()  # fair: share of a tenant; 1 where it is not named
    output_token_cost: float = 2.0  # fair: of a token that is generated; one of a prompt costs 1
    max_idle_tenants: int = 4096  # fair: whose counters are kept while they have no request
    skip_window: int = 8  # sequences that may be looked at behind one that does not fit the free blocks
    max_skips: int = 16  # admissions that may pass and delay a sequence; the next one waits for it

    def __post_init__(self) -> None:
        """Check the values, once."""
        limits = (("aging_ns", 1), ("max_idle_tenants", 0), ("skip_window", 0), ("max_skips", 0))
        for name, least in limits:
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        for name, value in (("output_token_cost", self.output_token_cost), *self.tenant_weights):
            if not MIN_WEIGHT <= value <= MAX_WEIGHT:
                limits_text = f"between {MIN_WEIGHT} and {MAX_WEIGHT:g}"
                raise ConfigError(f"the weight of {name!r} is {value}, but must be {limits_text}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler stays within. The first five are the executor's limits. Raises ConfigError when inconsistent.

    `max_num_batched_tokens` must be at least `max_num_seqs`: every running sequence gets its token in every step.
    """

    num_blocks: int  # of the KV buffer, the null block included
    block_size: int  # token positions per block, a power of two
    max_num_seqs: int  # running sequences
    max_num_batched_tokens: int  # tokens of one step, decode tokens and chunks together
    max_model_len: int  # tokens of one sequence, prompt and output
    max_waiting_requests: int = 1024  # sequences in the queue, above which new ones are refused
    max_waiting_tokens: int = 1 << 20  # known tokens in the queue, above which new ones are refused
    max_chunk_tokens: int = 0  # prompt tokens of one step, all chunks together; 0: what decode leaves of the step
    watermark_fraction: float = 0.01  # of the blocks, kept free by admission so that running sequences can grow
    target_itl_ns: int = 0  # between the tokens of a stream, which chunks respect; 0: chunks are as large as they can
    prefill_share: float = 0.1  # of the target, that prompts get in any case
    max_queue_wait_ns: int = 0  # from arrival to admission, after which a request is given up; 0: as long as it takes
    ordering: OrderingConfig = OrderingConfig()
    batching: BatchingMode = "continuous"  # the others are for comparison; see `batching`
    batch_window_ns: int = 0  # dynamic: how long a batch that is not full waits, from its first request's arrival
    # Whether full blocks are kept for sequences that begin with the same tokens. Only in continuous batching: batches
    # that end together give up no blocks before that, and begin together, so that they would find little.
    prefix_cache: bool = True
    num_host_blocks: int = 0  # in host memory, which keep cached blocks that the KV buffer has no room for
    host_block_ns: float = 0.0  # to copy one block to host memory, or back

    def __post_init__(self) -> None:
        """Check the limits, once."""
        for name, least in (
            ("num_blocks", 2),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_model_len", 2),
            ("max_waiting_requests", 1),
            ("max_waiting_tokens", 1),
            ("max_chunk_tokens", 0),
            ("max_queue_wait_ns", 0),
            ("batch_window_ns", 0),
            ("target_itl_ns", 0),
            ("num_host_blocks", 0),
            ("host_block_ns", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        for name in ("watermark_fraction", "prefill_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be in [0, 1)")
        self._check_buffer()
        self._check_steps()

    def _check_buffer(self) -> None:
        """Raise ConfigError for a KV buffer, or host memory, that cannot be."""
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}, but must be a power of two")
        if self.num_blocks * self.block_size > MAX_KV_SLOTS:
            most = MAX_KV_SLOTS // self.block_size
            raise ConfigError(
                f"num_blocks is {self.num_blocks}, but must be at most {most}: {self.block_size} tokens each have "
                "slots, which are 32-bit numbers"
            )
        if self.num_host_blocks and not self.prefix_cache:
            raise ConfigError(f"num_host_blocks is {self.num_host_blocks}, but must be 0 with prefix_cache off")

    def _check_steps(self) -> None:
        """Raise ConfigError for limits of steps, or rules of batching, that exclude each other."""
        if 0 < self.max_queue_wait_ns <= self.batch_window_ns:
            raise ConfigError(
                f"max_queue_wait_ns is {self.max_queue_wait_ns}, but must be above batch_window_ns, "
                f"{self.batch_window_ns}: no batch would start in time"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs, "
                f"{self.max_num_seqs}: every running sequence needs its token in a step"
            )
        if self.prefix_cache and self.batching != "continuous":
            raise ConfigError(f"prefix_cache is on, but must be off with {self.batching} batching")

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose K and V fit the buffer when one sequence has it all."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int((self.num_blocks - 1) * self.watermark_fraction)
