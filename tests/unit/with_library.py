"""Runs pytest on a given build of the op library: `python -m tests.unit.with_library LIBRARY ARGUMENT...`."""

import sys
from pathlib import Path

import pytest

import graphs.ops

if __name__ == "__main__":
    library = Path(sys.argv[1])
    graphs.ops.library_path = lambda: library  # before any test module asks
    sys.exit(pytest.main(sys.argv[2:]))
