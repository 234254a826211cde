"""From a configuration to loaded kernels, on a device that only keeps books."""

import hashlib

import pytest
from structlog.testing import capture_logs

from service.errors import ConfigError, ExecutorError
from service.executor.cuda.compiler import CubinCache
from service.executor.cuda.kernels import (
    SAMPLE_KERNELS,
    KernelConfig,
    PrefillShape,
    Scalar,
    choose_prefill_shape,
    kernel_specs,
    load_kernels,
    source_folder,
)
from service.executor.cuda.launch import LoadedKernel
from tests.cuda.kernel_builds import missing_nvrtc

CONFIG = KernelConfig(Scalar.HALF, head_dim=64, block_size=16, tile_tokens=64, logit=Scalar.HALF)


class Books:
    """A `ModuleLoader` that runs nothing. Handles count from 1."""

    architecture = "sm_90"

    def __init__(self):
        self.modules = []
        self.functions = []
        self.shared = {}

    def load(self, cubin):
        self.modules.append(cubin)
        return len(self.modules)

    def function(self, module, name):
        assert name.encode() in self.modules[module - 1]
        self.functions.append(name)
        return len(self.functions)

    def allow_shared_bytes(self, function, num_bytes):
        self.shared[self.functions[function - 1]] = num_bytes


@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
def test_every_kernel_that_is_launched_is_loaded_once_from_one_module_a_source(tmp_path):
    books = Books()
    kernels = load_kernels(CONFIG, CubinCache(tmp_path), books)
    names = ["rope_kv_write", "attn_decode", "attn_prefill", "attn_combine", *SAMPLE_KERNELS]
    assert names == list(kernels)
    assert names == books.functions
    assert 4 == len(books.modules) == len(list(tmp_path.iterdir()))
    assert LoadedKernel(2, 128, 39_168) == kernels["attn_decode"]
    assert LoadedKernel(4, 512, 0) == kernels["attn_combine"]


@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
def test_shared_memory_above_the_default_is_asked_for(tmp_path):
    books = Books()
    load_kernels(
        KernelConfig(Scalar.BF16, 96, 16, 64, Scalar.BF16, prefill=PrefillShape(128, 4, 64)),
        CubinCache(tmp_path),
        books,
    )
    assert {"attn_decode": 56_576, "attn_prefill": 79_872} == books.shared
    few = Books()
    load_kernels(CONFIG, CubinCache(tmp_path), few)
    assert {} == few.shared


class Choosy(Books):
    """Takes machine code alone."""

    def load(self, cubin):
        if cubin[:4] != b"\x7fELF":
            raise ExecutorError("cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE (200)")
        return super().load(cubin)


@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
def test_a_kept_cubin_that_the_device_refuses_is_compiled_again_and_replaced(tmp_path):
    load_kernels(CONFIG, CubinCache(tmp_path), Choosy())
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused = sorted(tmp_path.iterdir())[0]
    refused.write_bytes(b"PTX" + hashlib.sha256(b"PTX").digest())
    books = Choosy()
    with capture_logs() as events:
        assert 7 == len(load_kernels(CONFIG, CubinCache(tmp_path), books))
    assert ["cuda.kept_kernels_refused"] == [event["event"] for event in events]
    assert whole == {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
def test_a_kept_cubin_that_is_not_whole_is_compiled_again_and_never_loaded(tmp_path):
    first = Books()
    load_kernels(CONFIG, CubinCache(tmp_path), first)
    whole = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    empty, cut, longer, damaged = whole
    empty.write_bytes(b"")
    cut.write_bytes(whole[cut][: len(whole[cut]) // 2])
    longer.write_bytes(whole[longer] + b"\0")
    damaged.write_bytes(b"damaged")
    books = Books()
    with capture_logs() as events:
        load_kernels(CONFIG, CubinCache(tmp_path), books)
    assert first.modules == books.modules
    assert 4 * ["cuda.kept_kernels_damaged"] == [event["event"] for event in events]
    assert whole == {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
def test_a_new_cubin_that_the_device_refuses_is_an_error(tmp_path, monkeypatch):
    books = Choosy()
    monkeypatch.setattr(books, "load", lambda _: Choosy.load(books, b"refused"))
    with pytest.raises(ExecutorError, match="CUDA_ERROR_INVALID_IMAGE"):
        load_kernels(CONFIG, CubinCache(tmp_path), books)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 80}, "head_dim: 80 has no CUDA kernels; there are some for 64, 96, 128, 256"),
        ({"block_size": 64}, "block_size: 64 has no CUDA kernels; there are some for 16, 32"),
        ({"scalar": Scalar.FLOAT}, "for float16 and bfloat16 models only"),
    ],
)
def test_configuration_without_kernels_is_refused(changed, message):
    fields = {
        "scalar": Scalar.HALF,
        "head_dim": 64,
        "block_size": 16,
        "tile_tokens": 64,
        "logit": Scalar.HALF,
    } | changed
    with pytest.raises(ConfigError, match=message):
        KernelConfig(**fields)


def test_device_with_too_little_shared_memory_is_refused():
    needed = 64 * 528 + 4 * 32 * 528  # queries and four stages of 32 rows of 256 numbers, padded
    assert PrefillShape(64, 4, 32) == choose_prefill_shape(256, False, needed)
    with pytest.raises(ConfigError, match="head_dim: attention with 256 takes 101,376 bytes"):
        choose_prefill_shape(256, False, needed - 1)


def test_sources_are_all_there_and_no_package_hides_cuda_bindings():
    folder = source_folder()
    assert {spec.source for spec in kernel_specs(CONFIG)} == {path.name for path in folder.glob("*.cu")}
    assert [] == list(folder.rglob("*.py"))
