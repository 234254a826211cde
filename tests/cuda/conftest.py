"""A tiny float16 model with heads that the CUDA kernels hold, its CPU executor, and CUDA executors on host memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphs.export import export_model
from service.executor.config import ExecutorConfig
from service.executor.cuda.row_edits import SamplingBounds
from service.executor.factory import create_executor
from service.executor.ort import OrtExecutor
from tests.cuda.host_executor import HostExecutor
from tests.cuda.numpy_kernels import NumpyKernels
from tests.unit.tiny_export import write_tokenizer_json
from tests.unit.tiny_models import hf_tensors, tiny_config, write_hf

HEAD_DIM = 64
VOCAB_SIZE = 256
CONFIG = ExecutorConfig(
    model_dir=Path(), kv_memory="1MiB", max_num_seqs=6, max_num_batched_tokens=48, num_threads=2, block_size=16
)


MODEL = tiny_config(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    max_position_embeddings=256,
)
"""Two layers, 4 query heads of 64 for 2 KV heads, 256 tokens, a context of 256."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from weight format to a model folder of MODEL, whose source is float32, or "int8 of float16"."""
    exports = tmp_path_factory.mktemp("exports")

    def folder(name: str) -> Path:
        out = exports / name
        if not out.exists():
            weight_format, _, dtype = name.partition(" of ")
            source = exports / f"source-{dtype}"
            write_hf(source, MODEL, hf_tensors(MODEL), dtype=dtype or np.float32)
            write_tokenizer_json(source)
            export_model(source, out, weight_format)
        return out

    return folder


@pytest.fixture(scope="session")
def tiny_float16(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("float16")


@pytest.fixture(scope="session")
def cpu_executor(tiny_float16: Path) -> Iterator[OrtExecutor]:
    """The same model on the CPU kernels, float16 weights and KV, float32 in between."""
    executor = create_executor(replace(CONFIG, model_dir=tiny_float16))
    yield executor
    executor.close()


@pytest.fixture
def host_executor(tiny_float16: Path) -> Iterator[Callable[..., HostExecutor]]:
    """Makes CUDA executors on numpy kernels; keywords are fields of ExecutorConfig. All are closed in the end.

    `bounds` are the device's in sampling. `of_session` are attributes of the GraphSession, set before the executor is
    made.
    """
    made: list[HostExecutor] = []

    def make(
        kernels: NumpyKernels | None = None,
        *,
        bounds: SamplingBounds | None = None,
        of_session: dict[str, object] | None = None,
        **changes: object,
    ) -> HostExecutor:
        config = replace(CONFIG, **({"model_dir": tiny_float16} | changes))
        kernels = kernels or NumpyKernels(HEAD_DIM, config.block_size)
        made.append(HostExecutor.create(config, kernels, bounds=bounds, **(of_session or {})))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()
        assert each.device.num_buffers == 0
        assert each.kernels.errors == []
