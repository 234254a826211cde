"""A simulated device and the small kernels that the simulator's own tests run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimDevice, SimModule

HERE = Path(__file__).parent
RunKernel = Callable[..., np.ndarray]


@pytest.fixture
def device() -> Iterator[SimDevice]:
    """A plain device with threads in order."""
    if reason := missing_tool():
        pytest.skip(reason)
    device = SimDevice()
    yield device
    device.close()


@pytest.fixture
def load(device: SimDevice) -> Callable[[str], SimModule]:
    """The kernels of a file in this folder."""
    return lambda name: device.load(HERE / name)


@pytest.fixture
def register_op(device: SimDevice, load: Callable[[str], SimModule]) -> RunKernel:
    """Runs a kernel of register_ops.cu on equally long arrays: `run(name, dtype of the result, a, b, c)`."""

    def run(name: str, dtype: type[np.generic], *inputs: np.ndarray) -> np.ndarray:
        count = len(inputs[0])
        result = device.allocate(count * np.dtype(dtype).itemsize)
        pointers = [np.uint64(device.upload(each)) for each in inputs] + [np.uint64(result)]
        kernel = load("register_ops.cu").kernel(name)
        block = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if count % size == 0)
        device.launch(kernel, (count // block, 1, 1), (block, 1, 1), 0, pointers)
        return device.download(result, (count,), dtype)

    return run
