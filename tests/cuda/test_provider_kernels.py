"""ONNX Runtime's CUDA provider has a kernel of the right type for every op of every graph: its library says so.

Without a GPU the library cannot be asked, but a kernel that it registers is a class whose name is there to read, and
its machine code says what it is for.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort
import pytest

from service.executor.cuda.probe import PROVIDER_ARCHITECTURES, provider_runs_on
from tests.cuda.test_weight_formats import FORMATS, HALF_FORMATS, folder_of, loaded

__all__ = ["folder_of"]

LIBRARY = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="this ONNX Runtime has no CUDA provider")

TYPES = {"half": b"NS_9MLFloat16E", "bf16": b"NS_8BFloat16E"}
# Names as compilers write them: namespaces and class, each behind its length, then what the template is made for.
KERNELS = {
    "Gemm": b"N11onnxruntime4cuda4GemmI%(type)bE",
    "Mul": b"N11onnxruntime4cuda3MulI%(type)bE",
    "Sub": b"N11onnxruntime4cuda3SubI%(type)bE",
    "ReduceSum": b"N11onnxruntime4cuda9ReduceSumI%(type)bE",
    "RMSNormalization": b"N11onnxruntime4cuda7RMSNormI%(type)bf",
    "QuickGelu": b"N11onnxruntime7contrib4cuda9QuickGeluI%(type)bE",
    "MatMulNBits": b"N11onnxruntime7contrib4cuda11MatMulNBitsI%(type)bE",
    "SkipSimplifiedLayerNormalization": b"N11onnxruntime7contrib4cuda13SkipLayerNormI%(type)bLb1E",
}
OF_ANY_TYPE = {"Cast", "Gather", "Reshape", "Unsqueeze"}
OURS = {"PagedAttention", "SampleRows"}


@pytest.fixture(scope="module")
def library() -> Iterator[mmap.mmap]:
    with LIBRARY.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield mapped


@pytest.mark.parametrize("name", FORMATS)
def test_every_op_has_a_kernel_of_the_models_type(library: mmap.mmap, folder_of, name: str) -> None:
    scalar = "half" if name in HALF_FORMATS else "bf16"
    op_types = {node.op_type for node in loaded(folder_of(name)).graph.node} - OF_ANY_TYPE - OURS
    assert op_types <= KERNELS.keys()
    lacking = [each for each in op_types if library.find(KERNELS[each] % {b"type": TYPES[scalar]}) < 0]
    assert [] == lacking
    assert library.find(KERNELS["Gemm"] % {b"type": b"NS_9NoSuchTypeE"}) < 0


def code_of(library: mmap.mmap) -> Iterator[tuple[int, str]]:
    """Of every piece of device code: its kind (1 is PTX, 2 machine code), and the architecture."""
    one_card_only = 1 << 20
    start = 0
    while (start := library.find(struct.pack("<I", 0xBA55ED50), start)) >= 0:
        version, header_bytes, num_bytes = struct.unpack_from("<HHQ", library, start + 4)
        place, start = start + header_bytes, start + 4
        if (version, header_bytes) != (1, 16):
            continue
        end = place + num_bytes
        while place < end:
            kind, _, header_bytes, num_bytes = struct.unpack_from("<HHIQ", library, place)
            number, _, _, flags = struct.unpack_from("<IIIQ", library, place + 28)
            yield kind, f"sm_{number}" + "a" * bool(flags & one_card_only)
            place += header_bytes + num_bytes


def test_the_provider_has_machine_code_for_the_cards_that_are_not_refused(library: mmap.mmap) -> None:
    """As `cuobjdump --list-elf` and `--list-ptx` have it, too."""
    assert {(2, each) for each in PROVIDER_ARCHITECTURES[ort.__version__]} == set(code_of(library))


def test_machine_code_runs_on_its_own_and_later_cards_of_a_generation() -> None:
    for capability in ((7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (12, 0)):
        assert provider_runs_on(capability, "1.31.1")
    for capability in ((7, 2), (10, 0), (10, 3), (11, 0), (12, 1)):
        assert not provider_runs_on(capability, "1.31.1")
        assert provider_runs_on(capability, "1.99.0"), "of which nothing is known"
