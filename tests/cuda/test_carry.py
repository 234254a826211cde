"""What is carried to a machine without network: pieces that are whole again or named, and a provider for one card."""

import hashlib
import re
import struct
import subprocess
import zipfile
from base64 import urlsafe_b64decode
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.cuda.gpu_check.slim_provider import LIBRARY, MAGIC, blank, codes, describe, section, slim_wheel

README = Path(__file__).with_name("README.md")
PROVIDER = Path(ort.__file__).parent / "capi" / LIBRARY


def commands_of(mark: str, **replaced: str) -> str:
    """The block of shell commands of the README that begins with a comment."""
    (block,) = re.findall(rf"```sh\n({re.escape(mark)}.*?)```", README.read_text(), re.DOTALL)
    for old, new in replaced.items():
        assert old in block
        block = block.replace(old, new)
    return block


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def carried(tmp_path):
    """Files, their contents, and their pieces in a folder of another machine."""
    here, there = tmp_path / "here", tmp_path / "there"
    contents = {
        "wheels/a.whl": np.random.default_rng(1).bytes(50_000),
        "wheels/b c.whl": b"",
        "chairlift.tar": b"x" * 99,
    }
    for name, content in contents.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    made = run(commands_of("# In pieces", **{"48M": "4k"}), here)
    assert (0, "") == (made.returncode, made.stderr)
    pieces = sorted((here / "pieces").glob("part.*"))
    assert len(pieces) > 12 and max(piece.stat().st_size for piece in pieces) <= 4096
    there.mkdir()
    (here / "pieces").rename(there / "pieces")
    return there, contents


JOIN = "# Whole again"


def test_what_was_carried_in_pieces_is_whole_again(carried):
    there, contents = carried
    joined = run(commands_of(JOIN), there)
    assert (0, "") == (joined.returncode, joined.stderr)
    assert contents == {name: (there / name).read_bytes() for name in contents}


def test_a_piece_that_is_missing_or_damaged_is_named_and_nothing_is_unpacked(carried):
    there, _ = carried
    pieces = there / "pieces"
    (pieces / "part.07").rename(there / "part.07")
    damaged = bytearray((pieces / "part.02").read_bytes())
    damaged[100] ^= 1
    (pieces / "part.02").write_bytes(damaged)
    joined = run(commands_of(JOIN), there)
    assert joined.returncode != 0
    said = joined.stdout + joined.stderr
    assert "part.02: FAILED" in said and "part.07" in said and "part.03" not in said
    assert not (there / "wheels").exists()


def container(*entries: tuple[int, bytes]) -> bytes:
    """As a compiler leaves kernels: each with a header of 64 bytes that names its architecture at byte 28."""
    body = b""
    for architecture, code in entries:
        body += struct.pack("<HHIQIIHHI", 2, 0x101, 64, len(code), 0, 0, 0, 0, architecture).ljust(64, b"h") + code
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def elf(content: bytes) -> bytes:
    """A library of one section and the one of names."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    begin, table = 64, 64 + len(content) + len(names)
    header = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", table)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 2, 0)
    sections = struct.pack("<IIQQQQ", 1, 3, 0, 0, begin + len(content), len(names)).ljust(64, b"\0")
    sections += struct.pack("<IIQQQQ", 11, 1, 0, 0, begin, len(content)).ljust(64, b"\0")
    return header + content + names + sections


A, B, C = b"A" * 24, b"B" * 40, b"C" * 8
KERNELS = container((80, A), (90, B)) + bytes(16) + container((90, C), (120, A))
BLANKED = container((80, bytes(24)), (90, B)) + bytes(16) + container((90, C), (120, bytes(24)))


def test_code_for_other_architectures_becomes_zeros_and_nothing_else_changes():
    library = bytearray(elf(KERNELS))
    assert "0 MiB, code for sm_80, sm_90, sm_120" == describe(bytes(library))
    blank(library, 90)
    assert elf(BLANKED) == bytes(library)
    assert "0 MiB, code for sm_90" == describe(bytes(library))
    with pytest.raises(ValueError, match="there is no code for sm_100"):
        blank(library, 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a container.", "holds something else"),
        (struct.pack("<IHHQ", MAGIC, 1, 16, 72) + KERNELS[16:], "ends at byte"),
    ],
)
def test_a_library_of_another_build_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        blank(bytearray(elf(content)), 90)
    assert message in describe(elf(content))


def test_a_slim_wheel_is_a_wheel_whose_record_is_true(tmp_path):
    whole, name = tmp_path / "ort-1-py3.whl", f"onnxruntime/capi/{LIBRARY}"
    files = {name: elf(KERNELS), "onnxruntime/__init__.py": b"import capi\n"}
    lines = [f"{each},sha256=old,{len(content)}" for each, content in files.items()]
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("ort-1.dist-info/RECORD", "\n".join([*lines, "ort-1.dist-info/RECORD,,"]) + "\n")
        for each, content in files.items():
            wheel.writestr(each, content)
    with zipfile.ZipFile(slim_wheel(whole, 90, tmp_path / "slim")) as wheel:
        assert elf(BLANKED) == wheel.read(name)
        assert files["onnxruntime/__init__.py"] == wheel.read("onnxruntime/__init__.py")
        first, *rest = wheel.read("ort-1.dist-info/RECORD").decode().splitlines()
    assert [lines[1], "ort-1.dist-info/RECORD,,"] == rest
    said, digest, num_bytes = first.split(",")
    assert (name, len(elf(BLANKED))) == (said, int(num_bytes))
    assert hashlib.sha256(elf(BLANKED)).digest() == urlsafe_b64decode(digest.removeprefix("sha256=") + "=")


@pytest.mark.skipif(not PROVIDER.is_file(), reason="this ONNX Runtime has no CUDA provider")
def test_the_installed_provider_is_built_as_expected():
    library = PROVIDER.read_bytes()
    found = list(codes(library))
    assert {75, 80, 86, 89, 90, 120} == {each.architecture for each in found}
    begin, num_bytes = section(library)
    in_codes = sum(each.num_bytes for each in found)
    assert begin < found[0].begin and found[-1].begin + found[-1].num_bytes <= begin + num_bytes
    assert 0.95 * num_bytes < in_codes < num_bytes, "the rest is headers"
