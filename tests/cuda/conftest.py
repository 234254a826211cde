"""A tiny float16 model with heads that the CUDA kernels hold, its CPU executor, and CUDA executors on host memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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


@pytest.fixture(scope="session")
def tiny_float16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: two layers, 4 query heads of 64 for 2 KV heads, 256 tokens, a context of 256."""
    source = tmp_path_factory.mktemp("tiny-heads-of-64")
    config = tiny_config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
    )
    write_hf(source, config, hf_tensors(config))
    write_tokenizer_json(source)
    out = tmp_path_factory.mktemp("exports") / "float16"
    export_model(source, out, "float16")
    return out


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
        config = replace(CONFIG, model_dir=tiny_float16, **changes)
        kernels = kernels or NumpyKernels(HEAD_DIM, config.block_size)
        made.append(HostExecutor.create(config, kernels, bounds=bounds, **(of_session or {})))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()
        assert each.device.num_buffers == 0
        assert each.kernels.errors == []
