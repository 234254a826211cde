"""Asking for a GPU on a machine without one: a line that says what is missing, and exit code 2."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.pathfinder import DynamicLibNotFoundError

from graphs.manifest import MANIFEST_NAME
from service.errors import ConfigError
from service.executor import factory
from service.executor.cuda.driver import CudaDriver
from service.executor.cuda.driver_calls import StreamCalls
from service.executor.cuda.kernels_driver import DriverModules
from service.executor.cuda.launch import CudaOps, LoadedKernel
from service.executor.factory import create_executor
from service.executor.op_library import OpLibrary
from tests.cuda.conftest import CONFIG
from tests.cuda.gpu_check.__main__ import main as gpu_check


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
MISSING = "device: cuda cannot be used: no NVIDIA driver is installed: libcuda.so.1 is not found"


@pytest.mark.parametrize(("command", "rest"), [("serve", ["--port", "0"]), ("generate", ["A question"])])
def test_a_command_says_in_one_line_what_is_missing_and_exits_with_2(tiny_float16, command, rest) -> None:
    arguments = [sys.executable, "-m", "service.cli", command, "--model", str(tiny_float16), "--device", "cuda", *rest]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (2, f"chairlift {command}: {MISSING}\n") == (result.returncode, result.stderr)


def test_the_gpu_check_ends_at_once_and_says_why(tmp_path, capsys) -> None:
    assert 2 == gpu_check(["--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    rest = "nothing to check; DEVICE=sim runs the same steps on the simulator"
    assert ("", f"{MISSING}: {rest}\n") == (said.out, said.err)


def test_the_model_is_not_read_before(tiny_float16, tmp_path) -> None:
    for file in tiny_float16.iterdir():
        (tmp_path / file.name).touch()
    shutil.copy(tiny_float16 / MANIFEST_NAME, tmp_path)  # which holds the hashes of what the files should be
    with pytest.raises(ConfigError, match="no NVIDIA driver is installed"):
        create_executor(replace(CONFIG, model_dir=tmp_path, device="cuda"))


def test_what_no_card_would_help_is_told_first(tiny_folder) -> None:
    folder = tiny_folder("w8a8")
    with pytest.raises(ConfigError, match="weight format: 'w8a8' does not run on cuda: export the model as one of"):
        create_executor(replace(CONFIG, model_dir=folder, device="cuda"))


def test_without_the_cuda_package_the_driver_is_told(tiny_folder, monkeypatch) -> None:
    monkeypatch.setattr(factory, "has_cuda_package", lambda: False)
    with pytest.raises(ConfigError, match="no NVIDIA driver is installed"):
        create_executor(replace(CONFIG, model_dir=tiny_folder("w8a8"), device="cuda"))


def test_the_driver_and_its_launch_function_are_asked_for_without_harm() -> None:
    ops = CudaOps(OpLibrary().functions)
    for ask in (lambda: CudaDriver(ops), DriverModules):
        with pytest.raises(ConfigError, match=MISSING):
            ask()
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1 has no cuLaunchKernel"):
        ops.driver_launch()


def test_every_driver_call_has_arguments_that_the_bindings_take() -> None:
    """They are converted before the driver is looked for, so that it is missing is the only complaint left."""
    device = object.__new__(CudaDriver)
    device._context = driver.CUcontext(1)
    device._stream, device._events = driver.CUstream(7), [driver.CUevent(3)] * 3
    matrix = np.zeros((3, 4), np.int32)
    calls: list[Callable[[], object]] = [
        device.make_current,
        lambda: device.allocate(10),
        lambda: device.free(4096),
        lambda: device.allocate_pinned(10),
        lambda: device.free_pinned(matrix.view(np.uint8)),
        device.free_bytes,
        lambda: device.blocks_per_sm(LoadedKernel(5, 128, 1000)),
        lambda: device.wait_for(1),
        lambda: StreamCalls(device.stream),
    ]
    for call in calls:
        with pytest.raises(DynamicLibNotFoundError):
            call()
    assert "7" == device.providers(captures=True)[0][1]["user_compute_stream"]
