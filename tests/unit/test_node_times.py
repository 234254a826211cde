"""ONNX Runtime's profile, as its JSON looks, summed by run and op."""

import json
from collections import Counter
from pathlib import Path

from service.bench.node_times import node_times_ns, split


def node(ts: int, dur: int, op: str) -> dict:
    return {"cat": "Node", "name": f"n{ts}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": op}}


def test_times_are_summed_by_run_and_op(tmp_path: Path) -> None:
    events = [
        {"cat": "Session", "name": "session_initialization", "ts": 0, "dur": 50, "args": {}},
        {"cat": "Session", "name": "model_run", "ts": 200, "dur": 50, "args": {}},
        {"cat": "Session", "name": "model_run", "ts": 100, "dur": 50, "args": {}},
        node(101, 10, "AddRmsNormLinear"),
        node(120, 3, "PagedAttention"),
        node(125, 5, "MatMulNBits"),
        node(130, 7, "Gather"),
        node(201, 11, "MatMul"),
        node(60, 99, "MatMul"),
        {"cat": "Node", "name": "n_fence_before", "ts": 102, "dur": 9, "args": {"op_name": "MatMul"}},
    ]
    (tmp_path / "profile.json").write_text(json.dumps(events))
    runs = node_times_ns(tmp_path / "profile.json")
    first = Counter(AddRmsNormLinear=10_000, PagedAttention=3_000, MatMulNBits=5_000, Gather=7_000)
    assert [first, Counter(MatMul=11_000)] == runs
    assert [split(run) for run in runs] == [(15_000, 3_000), (11_000, 0)]
