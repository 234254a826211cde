"""How long a plan takes and how even it is: `python -m tests.cuda.plan_times`."""

import time
from dataclasses import replace

import numpy as np

from service.executor.cuda.attention_plan import AttentionPlanner, PlanLayout
from tests.cuda.plan_cases import LIMITS, balance, skewed_contexts

CASES = {
    "1 x 8,192": [8192],
    "8 x 1,024": [1024] * 8,
    "64 x 2,048": [2048] * 64,
    "64 skewed": skewed_contexts(),
    "256 x 2,048": [2048] * 256,
    "256 skewed": skewed_contexts(256),
    "4,096 x 512": [512] * 4096,
}

if __name__ == "__main__":
    print(f"{'step':>12} {'':>13} {'median us':>9} {'balance':>7}")
    for name, contexts in CASES.items():
        for is_deterministic in (False, True):
            limits = replace(LIMITS, max_seqs=4096, is_deterministic=is_deterministic)
            layout = PlanLayout.of(limits, has_prefill=False)
            planner = AttentionPlanner(limits, layout, np.zeros(layout.size, np.int32))
            step = np.arange(len(contexts) + 1, dtype=np.int32), np.array(contexts, np.int32)
            took_us = []
            for _ in range(200):
                started = time.perf_counter_ns()
                planner.fill(*step)
                took_us.append((time.perf_counter_ns() - started) / 1e3)
            kind = "deterministic" if is_deterministic else ""
            print(f"{name:>12} {kind:>13} {np.median(took_us):9.0f} {balance(planner.sections):7.3f}")
