"""How long a plan takes and how even it is: `python -m tests.cuda.plan_times`."""

import time
from dataclasses import replace

import numpy as np

from service.executor.cuda.attention_plan import AttentionPlanner
from service.executor.cuda.plan_layout import PlanLayout
from tests.cuda.plan_cases import LIMITS, balance, prefill_balance, skewed_contexts

# Contexts, of which one token is computed, or as many as a second list says.
DECODES = {
    "1 x 8,192": [8192],
    "8 x 1,024": [1024] * 8,
    "64 x 2,048": [2048] * 64,
    "64 skewed": skewed_contexts(),
    "256 x 2,048": [2048] * 256,
    "256 skewed": skewed_contexts(256),
    "4,096 x 512": [512] * 4096,
}
PREFILLS = {
    "32 at 32,800": ([32_800], [32]),
    "the same + 64 decode": ([32_800, *[2048] * 64], [32, *[1] * 64]),
    "20 x 30 at 10,000": ([10_000] * 20, [30] * 20),
    "256 x 30 skewed": ([30 + each for each in skewed_contexts(256)], [30] * 256),
    "1,088 at 61,440": ([61_440], [1088]),
    "4,096 at 65,536": ([65_536], [4096]),
    "8 x 1,024": ([1024] * 8, [1024] * 8),
}


def time_us(planner: AttentionPlanner, contexts: list[int], query_lens: list[int]) -> float:
    step = np.cumsum([0, *query_lens]).astype(np.int32), np.array(contexts, np.int32)
    took_us = []
    for _ in range(200):
        started = time.perf_counter_ns()
        planner.fill(*step)
        took_us.append((time.perf_counter_ns() - started) / 1e3)
    return float(np.median(took_us))


if __name__ == "__main__":
    print(f"{'step':>20} {'':>13} {'median us':>9} {'balance':>7}")
    for name, contexts in DECODES.items():
        for is_deterministic in (False, True):
            limits = replace(LIMITS, max_seqs=4096, is_deterministic=is_deterministic)
            layout = PlanLayout.of(limits, has_prefill=False)
            planner = AttentionPlanner(limits, layout, np.zeros(layout.size, np.int32))
            took_us = time_us(planner, contexts, [1] * len(contexts))
            kind = "deterministic" if is_deterministic else ""
            print(f"{name:>20} {kind:>13} {took_us:9.0f} {balance(planner.sections):7.3f}")
    for name, (contexts, query_lens) in PREFILLS.items():
        for is_deterministic in (False, True):
            limits = replace(LIMITS, is_deterministic=is_deterministic)
            layout = PlanLayout.of(limits, has_prefill=True)
            planner = AttentionPlanner(limits, layout, np.zeros(layout.size, np.int32))
            took_us = time_us(planner, contexts, query_lens)
            kind = "deterministic" if is_deterministic else "prefill"
            print(f"{name:>20} {kind:>13} {took_us:9.0f} {prefill_balance(planner.sections):7.3f}")
