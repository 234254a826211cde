"""A scheduler and a KV buffer in the middle of decoding, made without running the prompts."""

from dataclasses import replace
from typing import Final

import numpy as np

from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.types import Request, SamplingParams, StepResult
from service.executor.api import ExecutorLimits
from service.executor.kv_layout import KvArray, KvDtype, KvLayout, allocate_kv

_SAMPLING: Final = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_p=0.95, ignore_eos=True)


def filled_scheduler(limits: ExecutorLimits, batch: int, num_prompt_tokens: int) -> Scheduler:
    """A scheduler whose `batch` sequences have all computed their prompts, without running them."""
    num_prompt_tokens = max(1, num_prompt_tokens)
    config = SchedulerConfig(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * num_prompt_tokens,
        max_model_len=limits.max_model_len,
        max_waiting_tokens=batch * num_prompt_tokens,
        watermark_fraction=0.0,
        prefix_cache=False,  # all prompts are the same, and would share their blocks
    )
    scheduler = Scheduler(config)
    for seq_id in range(batch):
        prompt = np.full(num_prompt_tokens, 1, np.int32)
        scheduler.add(Request(seq_id=seq_id, prompt_token_ids=prompt, sampling=replace(_SAMPLING, seed=seq_id)))
    while scheduler.batch.num_decode_rows < batch:
        plan = scheduler.plan(0)
        assert plan is not None, "the sequences never end"
        scheduler.commit(plan, StepResult(token_ids=np.ones(int(plan.samples.sum()), np.int32)))
    return scheduler


def noisy_kv_cache(layout: KvLayout) -> list[KvArray]:
    """A KV buffer of random finite values: untouched pages would all be one page of zeros, read from a cache."""
    rng = np.random.default_rng(0)
    block: KvArray = np.zeros(layout.layer_shape[1:], layout.dtype)
    if layout.dtype is KvDtype.INT8:
        runs = block.reshape(2, layout.num_kv_heads, -1)
        num_values = layout.block_size * layout.head_dim
        runs[..., :num_values] = rng.integers(-127, 128, (2, layout.num_kv_heads, num_values))
        runs[..., num_values:] = np.full(layout.block_size, 0.01, np.float32).view(np.int8)
    else:
        block[:] = rng.standard_normal(block.shape)
    arrays = allocate_kv(layout)
    for array in arrays:
        array[:] = block
    return arrays
