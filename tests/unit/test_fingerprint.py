"""Sources that differ in name, size or time of a file have different fingerprints."""

import os
from pathlib import Path

from graphs.fingerprint import source_fingerprint


def test_fingerprint_is_that_of_names_sizes_and_times(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(b"12")
    os.utime(weights, ns=(0, 1000))
    seen = [source_fingerprint(folder)]
    (folder / "results.jsonl").write_bytes(b"3")
    assert [source_fingerprint(folder)] == seen  # no export reads it
    os.utime(weights, ns=(0, 2000))
    seen.append(source_fingerprint(folder))
    weights.write_bytes(b"123")
    os.utime(weights, ns=(0, 2000))
    seen.append(source_fingerprint(folder))
    weights.rename(folder / "v.safetensors")
    seen.append(source_fingerprint(folder))
    assert len(set(seen)) == 4
    folder.rename(tmp_path / "b")
    assert source_fingerprint(tmp_path / "b") == seen[-1]
