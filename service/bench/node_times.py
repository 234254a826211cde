"""Reads ONNX Runtime's profile: how long each kind of graph node took in every run."""

import json
from collections import Counter
from pathlib import Path
from typing import Final

# Ours do the norm, gate and quantising ahead of the product too, in the same node.
_INTEGER_GEMM_OPS: Final = frozenset({"QuantizedLinear", "RmsNormLinear", "AddRmsNormLinear", "SwiGluLinear"})
GEMM_OPS: Final = _INTEGER_GEMM_OPS | {"MatMul", "MatMulNBits", "Gemm", "FusedMatMul"}
ATTENTION_OPS: Final = frozenset({"PagedAttention"})


def node_times_ns(profile: Path) -> list[Counter[str]]:
    """For every run in `profile`, in order, nanoseconds by op name."""
    events = json.loads(profile.read_text("utf-8"))
    runs = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("name") == "model_run")
    nodes = sorted(
        (event["ts"], event["args"]["op_name"], event["dur"])
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )
    result: list[Counter[str]] = []
    index = 0
    for start, end in runs:
        times: Counter[str] = Counter()
        while index < len(nodes) and nodes[index][0] <= end:
            if nodes[index][0] >= start:
                times[nodes[index][1]] += nodes[index][2] * 1000
            index += 1
        result.append(times)
    return result


def split(times: Counter[str]) -> tuple[int, int]:
    """Nanoseconds of (GEMM, attention) in one run. With integer GEMMs the former include making their rows."""
    gemm = sum(value for op, value in times.items() if op in GEMM_OPS)
    return gemm, sum(value for op, value in times.items() if op in ATTENTION_OPS)
