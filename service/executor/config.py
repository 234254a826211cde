"""What an executor is built from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Far beyond what a machine can use, and low enough that a slip of the keyboard is told before memory runs out.
MAX_THREADS = 1024
MAX_NUM_SEQS = 1 << 16
MAX_NUM_BATCHED_TOKENS = 1 << 20
MAX_MODEL_LEN = 1 << 24
MAX_BLOCK_SIZE = 1 << 16

Capture = Literal["eager", "lazy", "off"]


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The executor's part of the configuration."""

    model_dir: Path  # a folder that `chairlift export` wrote
    device: Literal["cpu", "cuda"] = "cpu"
    kv_memory: str = "0.5"  # bytes ("512MiB"), or a share of the memory free after loading the weights ("0.5")
    kv_prefault: Literal["off", "on"] = "off"  # cpu: whether the KV buffer's memory is taken before it is used
    host_kv_memory: str = "0"  # cuda: bytes, or a share of the host's free memory, for blocks that leave the KV buffer
    kv_dtype: str = "auto"  # auto; cpu: float32, float16, int8; cuda: float16, bfloat16, fp8
    block_size: int = 16  # token positions per block, a power of two
    max_num_seqs: int = 16  # rows of one step
    max_num_batched_tokens: int = 512  # tokens of one step
    max_model_len: int | None = None  # tokens of one sequence; None: the model's context length
    num_threads: int | None = None  # None: as many processors as affinity and control groups allow
    spin: Literal["off", "step"] = "step"  # "step": worker threads spin briefly while a step runs, and only then
    capture: Capture = "eager"  # CUDA graphs of decode steps: at the start, each when it is first needed, or never
    capture_buckets: tuple[int, ...] | None = None  # numbers of rows to capture; None: a few up to max_num_seqs
    kernel_cache: str = "~/.cache/chairlift/kernels"  # folder of compiled CUDA kernels
    # cuda. off: last bits of prefill and decode depend on what else is in the step. on: decode is cut by its own
    # length, prefill never.
    deterministic: Literal["off", "on"] = "off"
    profile_path: Path | None = None  # prefix of a file that gets the time of every graph node; slows every step
