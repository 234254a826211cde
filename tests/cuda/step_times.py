"""What a replayed decode step costs the host: `python -m tests.cuda.step_times`. Device and session do nothing.

Inputs, plan, staging, and the calls themselves; an 8B-shaped model of 32 layers, 32 query heads for 8 KV heads of 128.
"""

import ctypes
import time
from pathlib import Path

import numpy as np

from graphs.manifest import Manifest, ModelInfo
from service.executor.config import ExecutorConfig
from service.executor.cuda.executor import CudaExecutor, CudaParts
from service.executor.cuda.launch import FLOAT16, LoadedKernel, ModelKernels
from service.executor.op_library import OpLibrary
from tests.cuda.host_device import HostDevice
from tests.cuda.host_executor import HostExecutor
from tests.cuda.launch_type import LAUNCH_TYPE, PTR
from tests.cuda.test_executor import decode_plan

MODEL = ModelInfo("8b", "llama", 128_256, 4096, 32, 32, 8, 128, 8192, None, (), add_bos=False)
NUM_STEPS = 300


class IdleDevice(HostDevice):
    """Enqueues nothing, and has no memory behind its addresses."""

    num_sms = 132

    def allocate(self, num_bytes: int) -> int:
        return 1 << 40

    def free(self, address: int) -> None:
        pass

    def free_bytes(self) -> int:
        return 64 << 30

    def enqueue(self, event, action) -> None:
        pass

    def mark(self, number: int) -> None:
        pass

    def wait_for(self, number: int) -> None:
        pass


class IdleSession:
    """Binds and runs nothing."""

    sliding_window = 0

    def new_binding(self) -> "IdleSession":
        return self

    def bind_input(self, *arguments: object) -> None:
        pass

    bind_output = bind_input
    run = bind_input
    close = bind_input


if __name__ == "__main__":
    loaded = [LoadedKernel(1, 128, 0)] * 7
    kernels = ModelKernels(*loaded, scalar_type=FLOAT16, kv_type=FLOAT16, head_dim=128, block_size=16, tile_tokens=64)
    launch = LAUNCH_TYPE(lambda *arguments: 0)
    device = IdleDevice(ctypes.cast(launch, PTR).value)
    config = ExecutorConfig(Path(), device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, kv_memory="0.9")
    parts = CudaParts(device, IdleSession(), kernels, OpLibrary(), lambda: None)
    executor = CudaExecutor(config, Manifest(MODEL, "float16", {}), parts)
    made = HostExecutor(executor, device, None, None)
    print(f"{'batch':>6} {'context':>8} {'median us':>10}")
    for num_rows in (1, 16, 64, 256):
        for context in (512, 2048, 8000):
            plan, batch = decode_plan(made, [context] * num_rows)
            took_us = []
            for _ in range(NUM_STEPS):
                started = time.perf_counter_ns()
                executor.dispatch(plan, batch).wait()
                took_us.append((time.perf_counter_ns() - started) / 1e3)
            print(f"{num_rows:6} {context:8} {np.median(took_us):10.0f}")
    executor.close()
