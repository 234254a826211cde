"""What this process may use of the machine: processors and memory, as affinity and control groups limit them."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where the system's files are read from; tests pass a folder of their own."""

# A v1 group without a limit reports the largest page-aligned int64.
_NO_LIMIT_BYTES = 1 << 60


def num_usable_cpus(root: Path = ROOT) -> int:
    """Processors that this process may keep busy: its affinity, less where a control group's quota is smaller.

    A quota is rounded down, for a pool wider than the quota is stopped for the rest of every period. At least 1.
    """
    limit = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for group in _groups(root, "cpu"):
        quota = _cpu_quota(group)
        if quota is not None:
            limit = min(limit, math.floor(quota))
    return max(1, limit)


def available_memory_bytes(root: Path = ROOT) -> int:
    """Bytes that this process can still take without swapping or being killed: the machine's and every group's rest."""
    available = _machine_available_bytes(root)
    for group in _groups(root, "memory"):
        rest = _memory_rest_bytes(group)
        if rest is not None:
            available = min(available, rest)
    return max(0, available)


def _machine_available_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control groups that may limit `controller`, of both versions, with all ancestors.

    In a container, the path that /proc reports may belong to the host; then only the mount itself exists.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            group = Path(path.strip().lstrip("/"))
            for folder in (group, *group.parents):
                if (root / mount / folder).is_dir():
                    yield root / mount / folder


def _cpu_quota(group: Path) -> float | None:
    """Processors per period, or None without a quota."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if not quota.strip() or not period.strip() or quota.strip() in {"max", "-1"}:
        return None
    return int(quota) / int(period)


def _memory_rest_bytes(group: Path) -> int | None:
    """Bytes until the group's limit, its file cache counted as free, or None without a limit."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(group / limit_name).strip()
        if not limit or limit == "max" or int(limit) >= _NO_LIMIT_BYTES:
            continue
        stat = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
        return int(limit) - int(_read(group / usage_name) or 0) + int(stat.get(cache_name, 0))
    return None


def _read(path: Path) -> str:
    """The file's text, or nothing: a kernel without this file has no such limit."""
    try:
        return path.read_text("utf-8", "surrogateescape")  # names of groups are any bytes
    except OSError:
        return ""
