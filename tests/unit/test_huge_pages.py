"""Collapsing is invisible but for its speed."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from service.executor import huge_pages
from service.executor.huge_pages import collapse_anonymous_memory
from tests.unit.process_memory import resident_bytes


def test_filled_memory_keeps_its_content_and_sparse_memory_stays_sparse() -> None:
    filled = np.frombuffer(mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    filled[:] = np.arange(256, dtype=np.uint8).repeat(1 << 16)
    sparse = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    sparse.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in range(0, len(sparse), 2 << 20):
        sparse[offset] = 1
    before_bytes = resident_bytes()
    moved_bytes = collapse_anonymous_memory()
    assert np.array_equal(np.arange(256, dtype=np.uint8).repeat(1 << 16), filled)
    assert resident_bytes() - before_bytes < 32 << 20
    assert moved_bytes % (2 << 20) == 0
    sparse.close()


def test_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "modèle.bin"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert collapse_anonymous_memory() >= 0


def test_a_system_without_it_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert collapse_anonymous_memory() == 0
