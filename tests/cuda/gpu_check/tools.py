"""NVIDIA's command-line tools: where they are, and how a module of this package runs under one."""

import importlib.metadata
import os
import shutil
import subprocess
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


def clocks() -> str:
    """What nvidia-smi says of driver, clocks now, power and temperature, of the first card; why it says nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not found"
    query = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return (said.stdout or said.stderr).strip()
