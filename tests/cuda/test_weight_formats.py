"""Weight and KV formats on the CUDA path: what the graph becomes, and whole steps on the simulator."""

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gguf import GGMLQuantizationType as Kind
from onnx import TensorProto

from graphs.export import export_model, write_graphs
from graphs.manifest import PREFILL_NAME, REQUIRED_FILES, WEIGHTS_NAME, FileRecord, Manifest
from graphs.ops import library_path
from graphs.weights import open_source
from service.core.types import TokenLogprobs
from service.executor.cuda.graph import cuda_graph
from service.executor.cuda.kernels import Scalar
from service.executor.cuda.precision import Precision
from service.executor.cuda.requirements import require_cuda_model
from service.executor.factory import create_executor
from service.executor.kv_layout import KvDtype
from tests.cuda.conftest import CONFIG, HEAD_DIM, MODEL, VOCAB_SIZE
from tests.cuda.simulated_kernels import SimulatedKernels
from tests.cuda.test_executor import requests
from tests.cuda.test_simulated_engine import GREEDY
from tests.cudasim.build import missing_tool
from tests.stepping import run_requests
from tests.unit.tiny_export import write_tokenizer_json
from tests.unit.tiny_models import hf_tensors, write_gguf, write_hf

NEEDS_SIMULATOR = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
FORMATS = ["float16", "bfloat16", "int8", "int8 of float16", "int4", "int4 of float16", "int4 of Q4_1"]
HALF_FORMATS = {"float16", "int8 of float16", "int4 of float16"}
"""Those that compute in float16. The others do in bfloat16."""


@pytest.fixture(scope="module")
def folder_of(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from FORMATS to model folders."""
    of_q4_1 = tmp_path_factory.mktemp("of-q4_1")

    def folder(name: str) -> Path:
        if name != "int4 of Q4_1":
            return tiny_folder(name)
        if not any(of_q4_1.iterdir()):
            write_int4_of_q4_1(of_q4_1, Manifest.load(tiny_folder("float16")))
        return of_q4_1

    return folder


def write_int4_of_q4_1(folder: Path, like: Manifest) -> None:
    """The file's own grids: zero points that are no whole codes, and an 8-bit embedding that is the head as well."""
    config = MODEL | {"tie_word_embeddings": True, "attention_bias": False}
    kind_of = lambda name: Kind.Q8_0 if name == "token_embd.weight" else Kind.Q4_1  # noqa: E731
    source = open_source(write_gguf(folder / "tiny.gguf", config, hf_tensors(config), kind_of))
    write_tokenizer_json(folder)
    write_graphs(source, folder, "int4")
    files = {name: FileRecord.of(folder / name) for name in REQUIRED_FILES}
    Manifest(replace(like.model, add_bos=False), "int4", files).save(folder)


def loaded(folder: Path, kv_dtype: str = "auto", domain: str = "chairlift.simulated") -> onnx.ModelProto:
    manifest = Manifest.load(folder)
    precision = require_cuda_model(replace(CONFIG, kv_dtype=kv_dtype), manifest)
    return onnx.load_from_string(cuda_graph(folder / PREFILL_NAME, manifest.model, domain, precision).content)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_on_the_device_once_and_only_attention_reads_float32(folder_of, name: str) -> None:
    graph = loaded(folder_of(name)).graph
    places = [str(tensor.external_data) for tensor in graph.initializer if tensor.external_data]
    assert len(places) == len(set(places))
    casts = [node for node in graph.node if node.op_type == "Cast"]
    narrowed = {node.input[0] for node in casts}
    wide = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    read = {value for node in graph.node for value in node.input if node.op_type not in {"Cast", "PagedAttention"}}
    assert set() == wide & read
    assert {"rope.cos", "rope.sin"} == wide - narrowed
    own = TensorProto.FLOAT16 if name in HALF_FORMATS else TensorProto.BFLOAT16
    assert {own} == {node.attribute[0].i for node in casts}


def test_embeddings_come_from_the_heads_codes(folder_of) -> None:
    """Bytes of weights.bin that the head has in another shape."""
    graph = loaded(folder_of("int4 of Q4_1")).graph
    (head,) = [
        tensor for tensor in graph.initializer if tensor.data_type == TensorProto.UINT8 and tensor.dims[0] == 256
    ]
    assert ["Gather", "MatMulNBits"] == [node.op_type for node in graph.node if head.name in node.input]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_types_fit_whatever_the_format(folder_of, tmp_path, name: str, kv_dtype: str) -> None:
    """ONNX Runtime checks the types of all ops, its own and ours, before it looks for kernels."""
    folder = folder_of(name)
    model = loaded(folder, kv_dtype)
    shutil.copy(folder / WEIGHTS_NAME, tmp_path)
    onnx.save(model, tmp_path / PREFILL_NAME)
    onnx.checker.check_model(str(tmp_path / PREFILL_NAME))
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        assert name not in HALF_FORMATS and "NOT_IMPLEMENTED" in str(error), error
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT  # token ids: it would be seen
    with pytest.raises(Exception, match=r"INVALID_GRAPH.*Type Error"):
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def by_token(logprobs: TokenLogprobs) -> np.ndarray:
    found = np.empty(VOCAB_SIZE)
    found[logprobs.top_token_ids] = logprobs.top_logprobs
    return found


def largest_difference(host_executor, folder: Path, kernels: object | None = None, **changes: object) -> float:
    """Of a log-probability, on the CUDA path and on the CPU, of three tokens or as long as texts are the same."""
    sampling = replace(GREEDY, max_tokens=3, num_logprobs=VOCAB_SIZE)
    asked = [replace(request, sampling=sampling) for request in requests(sampling, (70, 1, 130))]
    with closing(create_executor(replace(CONFIG, model_dir=folder))) as cpu:
        expected = run_requests(cpu, asked)
    found = run_requests(host_executor(kernels, model_dir=folder, **changes).executor, asked)
    differences = []
    for seq_id, tokens in expected.tokens.items():
        for index, token_id in enumerate(tokens):
            exact, ours = expected.logprobs[seq_id][index], found.logprobs[seq_id][index]
            differences.append(float(np.abs(by_token(exact) - by_token(ours)).max()))
            if token_id != found.tokens[seq_id][index]:
                break
    assert len(differences) >= 7, "of 9: decode steps are among them"
    return max(differences)


@pytest.mark.parametrize("name", ["int8 of float16", "int4 of float16"])
def test_integer_weights_yield_the_log_probabilities_of_the_cpu(host_executor, folder_of, name: str) -> None:
    """Kernels in numpy; MatMulNBits has float16 rows here, and float32 rows there."""
    assert largest_difference(host_executor, folder_of(name)) < 0.05


HALF, BF16 = Scalar.HALF, Scalar.BF16


@NEEDS_SIMULATOR
@pytest.mark.parametrize(
    ("name", "kv_dtype", "precision", "limit"),
    [
        ("int4 of float16", "auto", Precision(HALF, KvDtype.FLOAT16), 0.05),
        ("int8", "auto", Precision(BF16, KvDtype.BFLOAT16), 0.1),
        ("int4 of Q4_1", "auto", Precision(BF16, KvDtype.BFLOAT16), 0.1),
        ("float16", "fp8", Precision(HALF, KvDtype.FP8), 0.1),
        ("bfloat16", "auto", Precision(BF16, KvDtype.BFLOAT16), 0.1),
        ("bfloat16", "fp8", Precision(BF16, KvDtype.FP8), 0.2),
    ],
)
def test_the_real_kernels_yield_the_log_probabilities_of_the_cpu(
    host_executor, folder_of, name: str, kv_dtype: str, precision: Precision, limit: float
) -> None:
    kernels = SimulatedKernels(HEAD_DIM, CONFIG.block_size, precision=precision)
    assert largest_difference(host_executor, folder_of(name), kernels, kv_dtype=kv_dtype) < limit


@NEEDS_SIMULATOR
def test_activations_beyond_float16_stay_finite_in_integer_weights_of_other_models(host_executor, tmp_path) -> None:
    """The MLP's product is some hundred thousand, as in models that were trained in bfloat16."""
    tensors = hf_tensors(MODEL)
    for layer in range(MODEL["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp"
        tensors[f"{at}.up_proj.weight"] *= 2.0**18
        tensors[f"{at}.down_proj.weight"] *= 2.0**-18
    write_tokenizer_json(tmp_path)
    source = write_hf(tmp_path, MODEL, tensors, dtype=ml_dtypes.bfloat16)
    folder = export_model(source, tmp_path / "int8", "int8").folder
    kernels = SimulatedKernels(HEAD_DIM, CONFIG.block_size, precision=Precision(BF16, KvDtype.BFLOAT16))
    assert largest_difference(host_executor, folder, kernels) < 0.1
