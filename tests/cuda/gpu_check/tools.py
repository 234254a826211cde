"""NVIDIA's command-line tools: where they are, and how a module of this package runs under one."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

WHEELS = {"compute-sanitizer": "nvidia-cuda-sanitizer-api"}  # tool -> the wheel that brings it
FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*")


def find_tool(name: str, root: Path = Path("/")) -> Path | None:
    """On PATH, in its wheel, or where the CUDA toolkit puts it below `root`; the newest by name."""
    if found := shutil.which(name):
        return Path(found)
    if name in WHEELS:
        try:
            files = importlib.metadata.files(WHEELS[name]) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        for file in files:
            if file.parts[-2:] == ("bin", name):
                return Path(str(file.locate()))
    found_in = sorted(path for folder in FOLDERS for path in root.glob(f"{folder.lstrip('/')}/{name}"))
    runnable = [path for path in found_in if os.access(path, os.X_OK)]
    return runnable[-1] if runnable else None


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"tests.cuda.gpu_check.{module}", *arguments]
