"""The driver's owner against a libcuda.so.1 of our own, whose device is the host, in a process of its own."""

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import closing
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from service.errors import ConfigError, ExecutorError
from service.executor.cuda.driver import CudaDriver
from service.executor.cuda.kernels_driver import DriverModules
from service.executor.cuda.launch import CudaOps, LoadedKernel
from service.executor.cuda.memory import DeviceBuffer, PinnedBuffer
from service.executor.op_library import OpLibrary
from tests.cuda.kernel_builds import missing_nvrtc
from tests.cuda.launch_type import LAUNCH_TYPE

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def with_stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the stub: the loader reads its path when a process starts."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("stub_driver.cc")
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(folder / "libcuda.so.1"), "-ldl"], check=True)
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_buffers_copies_waits_and_launches_reach_the_driver(with_stub) -> None:
    result = run(with_stub, "tests.cuda.test_driver", "check_everything")
    assert (0, "done\n", "") == (result.returncode, result.stdout, result.stderr)


def test_a_device_that_cannot_be_opened_is_a_configuration_error_and_nothing_is_left(with_stub) -> None:
    result = run(with_stub, "tests.cuda.test_driver", "check_failures_to_open")
    assert (0, "done\n", "") == (result.returncode, result.stdout, result.stderr)


def test_what_cannot_be_given_back_does_not_keep_the_rest(with_stub) -> None:
    result = run(with_stub, "tests.cuda.test_driver", "check_failures_to_close")
    assert (0, "done\n", "") == (result.returncode, result.stdout, result.stderr)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"STUB_DRIVER_VERSION": "12080"},
            "the NVIDIA driver is for CUDA 12.8, and 13.0 is needed: driver 580 or newer",
        ),
        ({"STUB_CAPABILITY": "75"}, "the GPU has compute capability 7.5, and kernels take 8.0"),
        (
            {"STUB_CAPABILITY": "100"},
            f"the GPU has compute capability 10.0, which onnxruntime-gpu {ort.__version__} has no machine code for, "
            "only for sm_120a, sm_75, sm_80, sm_86, sm_89, sm_90a",
        ),
    ],
)
def test_what_no_model_runs_on_is_refused_in_one_line(with_stub, tiny_float16, changed, message) -> None:
    result = run(with_stub | changed, "service.cli", "serve", "--model", tiny_float16, "--device", "cuda", "--port", 0)
    expected = f"chairlift serve: device: cuda cannot be used: {message}\n"
    assert (2, expected, "") == (result.returncode, result.stderr, result.stdout)


def has_cuda_libraries() -> bool:
    packages = find_spec("nvidia")
    folders = [] if packages is None else list(packages.submodule_search_locations or ())
    is_packaged = any(list(Path(folder).rglob("libcublasLt.so.13")) for folder in folders)
    return is_packaged or find_library("cublasLt") is not None


@pytest.mark.skipif(has_cuda_libraries(), reason="CUDA libraries are installed")
@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
@pytest.mark.parametrize("weights", ["float16", "bfloat16"])
def test_serve_with_a_driver_but_without_cuda_libraries_says_so_in_one_line(
    with_stub, tiny_folder, tmp_path, weights: str
) -> None:
    """By then the kernels are compiled for the device, and kept. CPUs, where ONNX Runtime goes on, know no bfloat16."""
    arguments = ("--model", tiny_folder(weights), "--device", "cuda", "--port", 0, "--kernel-cache", tmp_path / "kept")
    result = run(with_stub, "service.cli", "serve", *arguments)
    library = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
    expected = (
        "chairlift serve: device: cuda cannot be used: ONNX Runtime's CUDAExecutionProvider does not start "
        f"(Failed to load libcublasLt.so.13: {library}); the CUDA libraries that it needs come with the package's "
        "extra, chairlift[cuda]\n"
    )
    assert (2, expected, "") == (result.returncode, result.stderr, result.stdout)
    names = {path.name.split("-")[0] for path in (tmp_path / "kept").iterdir()}
    assert {"rope_kv_write", "attention", "attention_combine", "sample_rows"} == names


def check_everything() -> None:
    stub = ctypes.CDLL("libcuda.so.1")
    device = CudaDriver(CudaOps(OpLibrary().functions))
    with closing(device):
        assert (132, 1 << 20) == (device.num_sms, device.free_bytes())
        assert 4 == stub.stub_context_flags(), "CU_CTX_SCHED_BLOCKING_SYNC, set before the context was made"
        check_copies(device)
        assert 0 == stub.stub_num_unlocked(), "what only enqueues lets no other thread run"
        kernel = LoadedKernel(5, 128, 1024)
        assert 8 == device.blocks_per_sm(kernel), "1,024 bytes over 128 threads: what the stub answers"
        assert 0 == LAUNCH_TYPE(device.launch_address)(5, 77, 1, 1, 128, 1, 1, 1024, device.stream, None, None)
        assert 77 == stub.stub_last_grid()
        with pytest.raises(ConfigError, match="2,097,152 bytes of GPU memory are not free"):
            device.allocate(2 << 20)
        with pytest.raises(ConfigError, match="2,097,152 bytes of memory cannot be page-locked"):
            device.allocate_pinned(2 << 20)
        with pytest.raises(ExecutorError, match=r"cuOccupancy\w+ failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
            device.blocks_per_sm(LoadedKernel(0, 128, 1024))
        with closing(CudaDriver(CudaOps(OpLibrary().functions))) as another:
            assert 132 == another.num_sms, "the context that is there already is taken as it is"
    device.close()
    assert 0 == stub.stub_num_left(), "buffers, stream, event and context are given back"


def check_failures_to_open() -> None:
    stub, ops = ctypes.CDLL("libcuda.so.1"), CudaOps(OpLibrary().functions)
    for name in (
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxGetState",
        "cuDevicePrimaryCtxSetFlags",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuStreamCreate",
        "cuEventCreate",
    ):
        failing = ctypes.create_string_buffer(f" {name} ".encode())
        stub.stub_fail(failing)
        message = rf"^device: cuda cannot be used: {name} failed: CUDA_ERROR_LAUNCH_FAILED \(719\)$"
        with pytest.raises(ConfigError, match=message):
            CudaDriver(ops)
        assert 0 == stub.stub_num_left(), name


def check_failures_to_close() -> None:
    stub = ctypes.CDLL("libcuda.so.1")
    failing = ctypes.create_string_buffer(b" cuEventDestroy cuStreamDestroy cuModuleUnload ")
    device, modules = CudaDriver(CudaOps(OpLibrary().functions)), DriverModules()
    modules.load(b"one")
    modules.load(b"another")
    stub.stub_fail(failing)
    for each, name in ((modules, "cuModuleUnload"), (device, "cuStreamDestroy")):
        with pytest.raises(ExecutorError, match=rf"{name} failed: .*719"):
            each.close()
        each.close()
    assert 0 == stub.stub_num_left()


def check_copies(device: CudaDriver) -> None:
    pinned, memory = PinnedBuffer(device, 400), DeviceBuffer(device, 400)
    ours, theirs = pinned.view((3, 4), np.int32), pinned.view((52,), np.int32, 100)
    ours[:] = np.arange(12).reshape(3, 4)
    device.clear(memory.address, 400)
    device.copy_in_rows(memory.address, 32, ours)
    device.copy_in(memory.address + 16, ours[0])
    device.copy_within(memory.address + 96, memory.address + 64, 4)
    far = np.array([memory.address + each for each in (100, 200)], np.uint64)
    near = np.array([memory.address + 32, pinned.view((1,), np.uint8).ctypes.data], np.uint64)
    device.copy_pieces(far, near, np.array([4, 8], np.uint64))
    device.copy_pieces(far[:0], near[:0], np.array([], np.uint64))
    device.copy_out(theirs, memory.address)
    device.wait()
    rows = [0, 1, 2, 3, 0, 1, 2, 3], [4, 5, 6, 7, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0, 0, 0], [8, 4], [0] * 24, [0, 1]
    assert np.concatenate(rows).tolist() == theirs.tolist()
    for buffer in (memory, pinned):
        buffer.close()
        buffer.close()


if __name__ == "__main__":
    {check.__name__: check for check in (check_everything, check_failures_to_open, check_failures_to_close)}[
        sys.argv[1]
    ]()
    print("done")
