"""What runs here, and whether this machine's compiler and driver make kernels of the sources that fit and spill not."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

import onnxruntime as ort

from service.executor.cuda.compiler import CubinCache
from service.executor.cuda.kernels import (
    BLOCK_SIZES,
    HEAD_DIMS,
    KernelConfig,
    Scalar,
    choose_prefill_shape,
    choose_tile_tokens,
    kernel_specs,
    source_folder,
)
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.resources import expected_blocks
from tests.cuda.gpu_check.slim_provider import LIBRARY, describe
from tests.cuda.gpu_check.tools import clocks, find_tool
from tests.cuda.kernel_builds import MACROS

Cubin = tuple[str, tuple[str, ...]]  # a source's name and its macros
MODEL_SCALARS = (Scalar.BF16, Scalar.HALF)


def environment(device: CheckDevice) -> Iterator[Row]:
    """Card, driver, clocks, versions and tools."""
    found = [name for name in ("compute-sanitizer", "ncu", "nvcc") if find_tool(name)]
    row = {**device.describe(), "driver, clocks, power": clocks(), "tools": ", ".join(found) or "none"}
    provider = Path(ort.__file__).parent / "capi" / LIBRARY
    yield row | {"CUDA provider": describe(provider.read_bytes()) if provider.is_file() else "none"}


def compilation(device: CheckDevice) -> Iterator[Row]:
    """Everything compiled with the NVRTC at hand, several at a time, for the steps that follow; then resources.

    An NVRTC that is newer than the driver passes this step only if the driver loads its cubins.
    """
    dims = (64,) if device.name == "sim" else HEAD_DIMS
    if device.name == "cuda":
        compile_all(device.folder / "kernels", device.modules.architecture, device.max_shared_bytes)
    num_spilled = num_few = num_unfit = 0
    for scalar, head_dim, is_fp8 in product(MODEL_SCALARS[: 1 if device.name == "sim" else 2], dims, (False, True)):
        config = kernel_config(device, scalar, head_dim, 16, is_fp8=is_fp8, logit=scalar)
        for used in device.resources(config):
            expected = expected_blocks(used)
            yield {"configuration": " ".join(config.definitions), **asdict(used), "expected on sm_90": expected}
            num_spilled += used.local_bytes != 0
            num_unfit += used.blocks_per_sm == 0
            is_sm_90 = device.name == "cuda" and device.modules.architecture == "sm_90"
            num_few += is_sm_90 and (used.blocks_per_sm or 0) < expected
    if num_spilled or num_unfit or num_few:
        raise StepFailedError(
            f"{num_spilled} kernels have stack or spills, {num_unfit} fit no multiprocessor, {num_few} fit fewer "
            "times than their resources say"
        )


def kernel_config(
    device: CheckDevice,
    scalar: Scalar,
    head_dim: int,
    block_size: int,
    *,
    is_fp8: bool = False,
    logit: Scalar = Scalar.FLOAT,
) -> KernelConfig:
    """With the shapes that the product chooses on the device."""
    at_hand = (head_dim, is_fp8, device.max_shared_bytes)
    tile, prefill = choose_tile_tokens(*at_hand), choose_prefill_shape(*at_hand)
    return KernelConfig(scalar, head_dim, block_size, tile, logit, is_fp8, prefill)


def all_cubins(max_shared_bytes: int) -> list[Cubin]:
    """Of every source with every set of macros that later steps ask for, each once.

    Kernel tests give a source the macros that it depends on; the product, whose configurations have their logits in the
    model's type and blocks of 16 here, gives it all of them.
    """
    cubins: dict[Cubin, None] = {}
    choices = product(MODEL_SCALARS, HEAD_DIMS, BLOCK_SIZES, (False, True), Scalar)
    for scalar, head_dim, block_size, is_fp8, logit in choices:
        at_hand = (head_dim, is_fp8, max_shared_bytes)
        tile, prefill = choose_tile_tokens(*at_hand), choose_prefill_shape(*at_hand)
        config = KernelConfig(scalar, head_dim, block_size, tile, logit, is_fp8, prefill)
        for source in {spec.source for spec in kernel_specs(config)}:
            cubins[source, tuple(each for each in config.definitions if each.split("=")[0] in MACROS[source])] = None
            if (block_size, logit) == (16, scalar):
                cubins[source, config.definitions] = None
    return sorted(cubins)


def compile_all(folder: Path, architecture: str, max_shared_bytes: int) -> None:
    """Into the cache. Raises ConfigError with the compiler's log."""
    cubins = all_cubins(max_shared_bytes)
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use CUDA, which is open here
    with ProcessPoolExecutor(min(len(cubins), os.cpu_count() or 1), spawn) as pool:
        for made in [pool.submit(_compile, folder, architecture, *each) for each in cubins]:
            made.result()


def _compile(folder: Path, architecture: str, source: str, macros: tuple[str, ...]) -> None:
    CubinCache(folder).cubin(source_folder() / source, architecture, macros)
