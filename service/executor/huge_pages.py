"""Moves memory that is already filled onto huge pages.

ONNX Runtime repacks weights into plain heap memory, and every step reads all of it: with 4 KiB pages a good part of
that time goes into address translation. Linux can merge filled pages on request (MADV_COLLAPSE, since 6.1). Best
effort: a system that cannot simply keeps its pages.
"""

import contextlib
import ctypes
import re
import sys
from pathlib import Path

from service.executor.buffers import HUGE_PAGE_BYTES

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_MIN_FILLED = 0.9
"""Mappings less resident than this are left alone: collapsing would fill the gaps and cost memory."""


def collapse_anonymous_memory() -> int:
    """Collapse this process's large, filled, private anonymous mappings; returns bytes that were moved.

    Call it after sessions are loaded and before large buffers are allocated. Does nothing outside Linux.
    """
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved_bytes = 0
    for start, end in _filled_mappings():
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        length = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
        if length > 0:
            libc.madvise(first, length, _MADV_HUGEPAGE)
            if libc.madvise(first, length, _MADV_COLLAPSE) == 0:
                moved_bytes += length
    return moved_bytes


def _filled_mappings() -> list[tuple[int, int]]:
    """Address ranges of writable anonymous mappings of at least one huge page that are nearly all resident."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/smaps").read_text("utf-8", "replace")  # paths of mapped files are any bytes
    mappings = []
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        header, _, fields = block.partition("\n")
        parts = header.split()
        # Fields: range, permissions, offset, device, inode, and a path unless the mapping is anonymous.
        if len(parts) < 5 or parts[1] != "rw-p" or parts[4] != "0" or (len(parts) > 5 and parts[5] != "[heap]"):
            continue
        start, end = (int(address, 16) for address in parts[0].split("-"))
        resident = re.search(r"^Rss:\s+(\d+) kB", fields, re.MULTILINE)
        if resident and end - start >= HUGE_PAGE_BYTES and int(resident[1]) * 1024 >= _MIN_FILLED * (end - start):
            mappings.append((start, end))
    return mappings
