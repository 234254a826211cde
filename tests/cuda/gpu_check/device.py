"""What the steps run on: a GPU or the simulator, opened by name."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from service.errors import ExecutorError
from tests.cuda.gpu_check.cuda_device import CudaDevice
from tests.cuda.gpu_check.sim_device import SimCheckDevice
from tests.cudasim.build import missing_tool

CheckDevice = SimCheckDevice | CudaDevice


class NotRunError(Exception):
    """Why a step cannot run on this device."""


class StepFailedError(Exception):
    """Why a step failed; the rows that it has yielded stay."""


@contextmanager
def open_device(name: str, folder: Path) -> Iterator[CheckDevice]:
    """The device called "sim" or "cuda", closed in the end; compiled kernels and logs go to `folder`.

    Raises NotRunError or ConfigError where there is none.
    """
    if name == "sim" and (missing := missing_tool()) is not None:
        raise NotRunError(missing)
    device = SimCheckDevice(folder) if name == "sim" else CudaDevice(folder)
    try:
        yield device
    except BaseException:
        with suppress(ExecutorError):  # after a fault nothing can be freed; the fault is what is told
            device.close()
        raise
    device.close()


def need_gpu(device: CheckDevice, why: str) -> CudaDevice:
    """The device, if it is a GPU. Raises NotRunError."""
    if not isinstance(device, CudaDevice):
        raise NotRunError(f"needs a GPU: {why}")
    return device
