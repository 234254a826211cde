"""Compiling and keeping cubins. Needs NVRTC, but no GPU or driver."""

import ctypes
import hashlib

import pytest
from structlog.testing import capture_logs

from service.errors import ConfigError
from service.executor.cuda.compiler import CubinCache, compile_cubin
from tests.cuda.kernel_builds import missing_nvrtc

pytestmark = pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))

SOURCE = """
#include "factor.cuh"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= kFactor * SCALE; }
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "factor.cuh").write_text("constexpr float kFactor = 2.0f;\n")
    path = tmp_path / "scale.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cubins" / "here"


@pytest.mark.parametrize(("architecture", "number"), [("sm_80", 80), ("sm_90", 90)])
def test_cubin_is_machine_code_of_the_architecture(source, architecture, number):
    compiled = compile_cubin(source, architecture, ("SCALE=3",))
    header = compiled.cubin[:64]
    assert b"\x7fELF" == header[:4]
    assert 190 == ctypes.c_uint16.from_buffer_copy(header, 18).value  # EM_CUDA
    assert number in ctypes.c_uint32.from_buffer_copy(header, 48).value.to_bytes(4, "little")  # e_flags
    assert f"for '{architecture}'" in compiled.log


def test_error_shows_the_compilers_log(source):
    with pytest.raises(ConfigError, match=r'scale.cu does not compile for sm_90:\n(.|\n)*"SCALE" is undefined'):
        compile_cubin(source, "sm_90")


def test_unknown_architecture_is_refused(source):
    with pytest.raises(ConfigError, match="sm_12"):
        compile_cubin(source, "sm_12", ("SCALE=3",))


def test_second_request_reads_what_the_first_kept(source, folder):
    first = CubinCache(folder).cubin(source, "sm_90", ("SCALE=3",))
    (kept,) = folder.iterdir()
    assert first + hashlib.sha256(first).digest() == kept.read_bytes()
    kept.write_bytes(b"kept" + hashlib.sha256(b"kept").digest())
    assert b"kept" == CubinCache(folder).cubin(source, "sm_90", ("SCALE=3",))


@pytest.mark.parametrize("change", ["source", "header", "definition", "architecture"])
def test_any_change_is_compiled_anew(source, folder, change):
    cache = CubinCache(folder)
    first = cache.cubin(source, "sm_90", ("SCALE=3",))
    if change == "source":
        source.write_text(SOURCE.replace("*=", "+="))
    if change == "header":
        source.with_name("factor.cuh").write_text("constexpr float kFactor = 4.0f;\n")
    definition = "SCALE=5" if change == "definition" else "SCALE=3"
    assert first != cache.cubin(source, "sm_80" if change == "architecture" else "sm_90", (definition,))
    assert 2 == len(list(folder.iterdir()))


def test_nothing_is_left_of_a_failed_compilation(source, folder):
    with pytest.raises(ConfigError):
        CubinCache(folder).cubin(source, "sm_90")
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to_costs_a_warning(source, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with capture_logs() as events:
        cubin = CubinCache(blocked).cubin(source, "sm_90", ("SCALE=3",))
    assert compile_cubin(source, "sm_90", ("SCALE=3",)).cubin == cubin
    assert [("cuda.kernels_not_kept", str(blocked))] == [(event["event"], event["folder"]) for event in events]
    assert [blocked] == [path for path in tmp_path.iterdir() if path.suffix not in {".cu", ".cuh"}]


def test_a_folder_in_a_home_that_nobody_knows_costs_one_warning(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with capture_logs() as events:
        cache = CubinCache.open("~nobody-of-this-name/kernels")
        cubins = [cache.cubin(source, "sm_90", (f"SCALE={scale}",)) for scale in (3, 5)]
    assert cubins == [compile_cubin(source, "sm_90", (f"SCALE={scale}",)).cubin for scale in (3, 5)]
    kept_nowhere = ("cuda.kernels_not_kept", "~nobody-of-this-name/kernels")
    assert [kept_nowhere] == [(event["event"], event["folder"]) for event in events]
    assert {"factor.cuh", "scale.cu"} == {path.name for path in tmp_path.iterdir()}


def test_a_folder_in_the_user_s_home_is_found(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    CubinCache.open("~/kernels").cubin(source, "sm_90", ("SCALE=3",))
    assert 1 == len(list((tmp_path / "home" / "kernels").iterdir()))
