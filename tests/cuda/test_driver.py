"""The driver's owner against a libcuda.so.1 of our own, whose device is the host, in a process of its own."""

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from service.errors import ConfigError, ExecutorError
from service.executor.cuda.driver import CudaDriver
from service.executor.cuda.launch import CudaOps, KernelLaunch, LoadedKernel
from service.executor.cuda.memory import DeviceBuffer, PinnedBuffer
from service.executor.op_library import OpLibrary

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_buffers_copies_waits_and_launches_reach_the_driver(tmp_path) -> None:
    source = Path(__file__).with_name("stub_driver.cc")
    library = tmp_path / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run([*command, "-ldl"], check=True)
    # The loader reads the path when a process starts, and the bindings look for the driver once.
    result = subprocess.run(
        [sys.executable, "-m", "tests.cuda.test_driver"],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "done\n", "") == (result.returncode, result.stdout, result.stderr)


def check_everything() -> None:
    stub = ctypes.CDLL("libcuda.so.1")
    device = CudaDriver(CudaOps(OpLibrary().functions))
    with closing(device):
        assert (132, 1 << 20) == (device.num_sms, device.free_bytes())
        check_copies(device)
        kernel = LoadedKernel(5, 128, 1024)
        assert 8 == device.blocks_per_sm(kernel), "1,024 bytes over 128 threads: what the stub answers"
        KernelLaunch(device.launch_address, kernel, device.stream, [ctypes.c_int32(1)])(77)
        assert 77 == stub.stub_last_grid()
        with pytest.raises(ConfigError, match="2,097,152 bytes of GPU memory are not free"):
            device.allocate(2 << 20)
        with pytest.raises(ConfigError, match="2,097,152 bytes of memory cannot be page-locked"):
            device.allocate_pinned(2 << 20)
        with pytest.raises(ExecutorError, match=r"cuOccupancy\w+ failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
            device.blocks_per_sm(LoadedKernel(0, 128, 1024))
    device.close()
    assert 0 == stub.stub_num_left(), "buffers, stream, event and context are given back"


def check_copies(device: CudaDriver) -> None:
    pinned, memory = PinnedBuffer(device, 400), DeviceBuffer(device, 400)
    ours, theirs = pinned.view((3, 4), np.int32), pinned.view((25,), np.int32, 100)
    ours[:] = np.arange(12).reshape(3, 4)
    device.clear(memory.address, 400)
    device.copy_in_rows(memory.address, 32, ours)
    device.copy_in(memory.address + 16, ours[0])
    device.copy_within(memory.address + 96, memory.address + 64, 4)
    device.copy_out(theirs, memory.address)
    device.wait()
    rows = [0, 1, 2, 3, 0, 1, 2, 3], [4, 5, 6, 7, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0, 0, 0], [8]
    assert np.concatenate(rows).tolist() == theirs.tolist()
    for buffer in (memory, pinned):
        buffer.close()
        buffer.close()


if __name__ == "__main__":
    check_everything()
    print("done")
