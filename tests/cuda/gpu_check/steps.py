"""The steps of the GPU check, in the order in which they run: what the project waits for most first in each part."""

from dataclasses import dataclass
from typing import Final

PART_LIMIT_S: Final = 480


@dataclass(frozen=True)
class Step:
    """`function`, like "module:name" of this package or of any, takes a device and yields rows for its table.

    It raises StepFailedError, or any other error, when it failed, and NotRunError when it cannot run.
    """

    number: int  # in the table of tests/cuda/README.md
    name: str
    function: str
    limit_s: float
    part: int = 1  # 1: are the kernels right? 2: are they fast?


_HERE: Final = "tests.cuda.gpu_check."

STEPS: Final = (
    Step(0, "environment", _HERE + "compilation:environment", 20),
    Step(1, "compilation", _HERE + "compilation:compilation", 60),
    Step(2, "attention", _HERE + "correctness:attention", 90),
    Step(2, "rope", _HERE + "correctness:rope", 20),
    Step(2, "sampling", _HERE + "sampling:sampling", 35),
    Step(3, "stored-outputs", _HERE + "stored:replay", 15),
    Step(3, "newer-cubin", _HERE + "stored:newer_cubin", 10),
    Step(4, "ceilings", _HERE + "ceilings:ceilings", 20),
    Step(4, "host-kv", _HERE + "host_kv:host_kv", 10),
    Step(4, "matmul", _HERE + "matmul:matmul", 35),
    Step(8, "graph-ids", _HERE + "graph_ids:graph_ids", 20),
    Step(8, "op-graphs", _HERE + "op_graphs:op_graphs", 30),
    Step(9, "sanitizers", _HERE + "sanitizers:sanitizers", 115),
    Step(5, "decode-times", _HERE + "attention_times:decode_times", 85, 2),
    Step(5, "kernel-times", _HERE + "kernel_times:kernel_times", 10, 2),
    Step(7, "prefill-times", _HERE + "attention_times:prefill_times", 25, 2),
    Step(8, "model-tokens", _HERE + "model_tokens:model_tokens", 40, 2),
    Step(8, "model-formats", _HERE + "model_tokens:model_formats", 30, 2),
    Step(8, "model-times", _HERE + "model_times:model_times", 60, 2),
    Step(6, "sdpa", _HERE + "peers.sdpa_steps:times", 30, 2),
    Step(6, "flashinfer", _HERE + "peers.flashinfer_steps:times", 35, 2),
    Step(6, "triton", _HERE + "peers.triton_steps:times", 30, 2),
    Step(6, "ort-paged-attention", _HERE + "peers.ort_steps:times", 20, 2),
    Step(6, "torch-matmul", _HERE + "peers.sdpa_steps:matmul", 15, 2),
    Step(10, "ncu", _HERE + "profiler:profile", 30, 2),
    Step(8, "session-memory", _HERE + "session_memory:session_memory", 25, 2),
    Step(8, "external-capture", _HERE + "external_capture:external_capture", 20, 2),
    Step(6, "flex-attention", _HERE + "peers.flex_steps:times", 25, 2),
)
