"""The scheduler's limits."""

from dataclasses import dataclass

from service.errors import ConfigError


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
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}, but must be a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs, "
                f"{self.max_num_seqs}: every running sequence needs its token in a step"
            )
        if not 0.0 <= self.watermark_fraction < 1.0:
            raise ConfigError(f"watermark_fraction is {self.watermark_fraction}, but must be in [0, 1)")

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose K and V fit the buffer when one sequence has it all."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int((self.num_blocks - 1) * self.watermark_fraction)
