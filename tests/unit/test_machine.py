"""Processors and memory as control groups limit them, from files laid out as Linux does."""

import os
from pathlib import Path

import pytest

from service.executor.machine import available_memory_bytes, num_usable_cpus

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {64 * GIB // 1024} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return root


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


V2 = {"proc/self/cgroup": "0::/pod/box\n"}
V1 = {"proc/self/cgroup": "4:memory:/pod/box\n2:cpu,cpuacct:/pod/box\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}, 8),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "300000 100000\n"}, 3),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "350000 100000\n"}, 3),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "50000 100000\n"}, 1),
        ({**V2, "sys/fs/cgroup/pod/cpu.max": "200000 100000\n", "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}, 2),
        ({**V2, "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/kästchen\n", "sys/fs/cgroup/kästchen/cpu.max": "200000 100000\n"}, 2),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/pod/box/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/pod/box/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/pod/box/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_cpus_are_the_affinity_or_the_smallest_quota(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert expected == num_usable_cpus(write(tmp_path, files))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64 * GIB),
        ({**V2, "sys/fs/cgroup/pod/box/memory.max": "max\n"}, 64 * GIB),
        (
            {
                **V2,
                "sys/fs/cgroup/pod/box/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/pod/box/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/pod/box/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
            },
            2 * GIB,
        ),
        (
            {
                **V2,
                "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
            },
            0,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/pod/box/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/pod/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        ({**V1, "sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": "9223372036854771712\n"}, 64 * GIB),
    ],
)
def test_memory_is_the_machines_or_the_smallest_groups_rest(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert expected == available_memory_bytes(write(tmp_path, files))
