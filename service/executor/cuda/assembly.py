"""Puts a CUDA executor together: device, kernels, session."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Final

import onnxruntime as ort

from graphs.manifest import PREFILL_NAME, Manifest, ModelInfo
from service.executor.config import ExecutorConfig
from service.executor.cuda.compiler import CubinCache
from service.executor.cuda.driver import CudaDriver
from service.executor.cuda.executor import CudaExecutor, CudaParts
from service.executor.cuda.graph import cuda_graph
from service.executor.cuda.kernels import (
    KernelConfig,
    Scalar,
    choose_prefill_shape,
    choose_tile_tokens,
    load_kernels,
)
from service.executor.cuda.kernels_driver import DriverModules
from service.executor.cuda.launch import BFLOAT16, FLOAT8E4M3FN, FLOAT16, CudaOps, LoadedKernel, ModelKernels
from service.executor.cuda.precision import Precision
from service.executor.cuda.requirements import require_cuda_model
from service.executor.cuda.session import OrtSession
from service.executor.op_library import OpLibrary

_WARNING: Final = 2  # severities of ONNX Runtime's log; this one is what it starts with
_FATAL: Final = 4


def create_cuda_executor(config: ExecutorConfig, manifest: Manifest) -> CudaExecutor:
    """Load a checked model folder onto the first GPU. Raises ConfigError for what this model or machine cannot do."""
    precision = require_cuda_model(config, manifest)
    library = OpLibrary()
    with ExitStack() as undo:
        device = undo.enter_context(closing(CudaDriver(CudaOps(library.functions))))
        modules = undo.enter_context(closing(DriverModules()))
        kernels = _compiled_kernels(config, manifest.model, precision, modules)
        graph = cuda_graph(config.model_dir / PREFILL_NAME, manifest.model, device.op_domain, precision)
        captures = config.capture != "off"
        with quiet_onnxruntime():
            said = preload_cuda_libraries()
            session = OrtSession.load(
                config.model_dir, graph, library.path, device, captures=captures, preload_said=said
            )
        undo.enter_context(closing(session))
        executor = CudaExecutor(config, manifest, CudaParts(device, session, kernels, library, modules.close))
        undo.pop_all()  # from here on they are the executor's
    return executor


@contextmanager
def quiet_onnxruntime() -> Iterator[None]:
    """Keep what ONNX Runtime logs off standard error meanwhile: what is missing is told in one line, as an error."""
    ort.set_default_logger_severity(_FATAL)
    try:
        yield
    finally:
        ort.set_default_logger_severity(_WARNING)  # it cannot be asked for the one before


def preload_cuda_libraries() -> str:
    """Load CUDA libraries that came as packages, where the system's loader does not look.

    Yields the first line that was printed about it, "" when nothing is missing.
    """
    nvidia = find_spec("nvidia")
    packages = [] if nvidia is None else [Path(each) for each in nvidia.submodule_search_locations or ()]
    said = StringIO()
    with redirect_stdout(said):
        ort.preload_dlls(directory=libraries_elsewhere(Path(ort.__file__).parents[1] / "nvidia", packages))
    return said.getvalue().partition("\n")[0].strip()


def libraries_elsewhere(beside: Path, packages: Sequence[Path]) -> str | None:
    """The folder of the CUDA libraries among `packages`, unless they are `beside` ONNX Runtime or nowhere.

    It looks for packages beside itself only, while those of an environment below its own, say, may lie elsewhere.
    """
    found = {folder: sorted(folder.glob("*/lib/libcublasLt.so.*")) for folder in (beside, *packages)}
    if found[beside] or not any(found.values()):
        return None
    return str(next(libraries[-1].parent for libraries in found.values() if libraries))


def model_kernels(config: KernelConfig, loaded: Mapping[str, LoadedKernel]) -> ModelKernels:
    """What the executor needs of the kernels that were loaded for `config`."""
    scalar_type = FLOAT16 if config.scalar is Scalar.HALF else BFLOAT16
    return ModelKernels(
        rope_kv_write=loaded["rope_kv_write"],
        attn_decode=loaded["attn_decode"],
        attn_prefill=loaded["attn_prefill"],
        attn_combine=loaded["attn_combine"],
        sample_scan=loaded["sample_scan"],
        sample_count=loaded["sample_count"],
        sample_draw=loaded["sample_draw"],
        scalar_type=scalar_type,
        kv_type=FLOAT8E4M3FN if config.is_kv_fp8 else scalar_type,
        head_dim=config.head_dim,
        block_size=config.block_size,
        tile_tokens=config.tile_tokens,
        prefill_rows=config.prefill.num_rows,
    )


def _compiled_kernels(
    config: ExecutorConfig, model: ModelInfo, precision: Precision, modules: DriverModules
) -> ModelKernels:
    """The kernels of a model for the device of `modules`, compiled unless the cache holds them."""
    device = (model.head_dim, precision.is_kv_fp8, modules.max_shared_bytes)
    kernel_config = precision.kernel_config(
        model.head_dim, config.block_size, choose_tile_tokens(*device), choose_prefill_shape(*device)
    )
    cache = CubinCache.open(config.kernel_cache)
    return model_kernels(kernel_config, load_kernels(kernel_config, cache, modules))
