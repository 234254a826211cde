"""A wheel of onnxruntime-gpu whose CUDA provider has code for one architecture, for where little can be carried.

python -m tests.cuda.gpu_check.slim_provider WHEEL 90 FOLDER    writes a wheel of the same name into FOLDER

The provider's library holds, in its section .nv_fatbin, the same kernels for many architectures, each with a header
that says for which. Here the headers stay as they are, and code for others becomes zeros, which packs to next to
nothing; a driver reads the code of its own architecture only. That such a library runs has not been seen on a GPU yet.
"""

import base64
import hashlib
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libonnxruntime_providers_cuda.so"
SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50


@dataclass(frozen=True)
class Code:
    """A kernel's code for one architecture: where it lies in the file."""

    begin: int
    num_bytes: int
    architecture: int  # 90 for sm_90


def codes(library: bytes | bytearray) -> Iterator[Code]:
    """All of a library. Raises ValueError where it is not built as expected."""
    begin, num_bytes = section(library)
    at, end = begin, begin + num_bytes
    while at < end:
        magic, _, header_bytes, body_bytes = struct.unpack_from("<IHHQ", library, at)
        if magic == 0:  # padding between containers
            at += 8
            continue
        if magic != MAGIC:
            raise ValueError(f"{SECTION} holds something else at byte {at}")
        at += header_bytes
        container_end = at + body_bytes
        while at < container_end:
            entry_header_bytes, code_bytes = struct.unpack_from("<IQ", library, at + 4)
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            yield Code(at + entry_header_bytes, code_bytes, architecture)
            at += entry_header_bytes + code_bytes
        if at != container_end or at > end:
            raise ValueError(f"{SECTION} has an entry that ends at byte {at}, beyond its container")


def section(library: bytes | bytearray) -> tuple[int, int]:
    """Where SECTION begins in a 64-bit ELF file, and its length. Raises ValueError if there is none."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", library, 0x3A)
    entries = [struct.unpack_from("<IIQQQQ", library, table + i * entry_bytes) for i in range(count)]
    for name_at, *_, begin, num_bytes in entries:
        name_begin = entries[names][4] + name_at
        if library[name_begin : library.index(0, name_begin)] == SECTION.encode():
            return begin, num_bytes
    raise ValueError(f"there is no section {SECTION}")


def blank(library: bytearray, architecture: int) -> None:
    """Zeros in place of all code but that for `architecture`. Raises ValueError if there is none for it."""
    found = list(codes(library))
    if architecture not in {each.architecture for each in found}:
        raise ValueError(f"there is no code for sm_{architecture}")
    for each in found:
        if each.architecture != architecture:
            library[each.begin : each.begin + each.num_bytes] = bytes(each.num_bytes)


def describe(library: bytes) -> str:
    """Its size, and the architectures that it has code for, which is not zeros; or why that cannot be told."""
    try:
        found = {
            each.architecture
            for each in codes(library)
            if any(library[each.begin : each.begin + min(64, each.num_bytes)])
        }
    except ValueError as error:
        return str(error)
    return f"{len(library) >> 20} MiB, code for {', '.join(f'sm_{each}' for each in sorted(found)) or 'nothing'}"


def slim_wheel(wheel: Path, architecture: int, folder: Path) -> Path:
    """Write the wheel into `folder`, which is not where it lies."""
    folder.mkdir(parents=True, exist_ok=True)
    slim = folder / wheel.name
    changed: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(slim, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        # The record comes last: it says what the others are.
        for name in sorted(source.namelist(), key=lambda name: name.endswith(".dist-info/RECORD")):
            content = source.read(name)
            if name.endswith(f"/{LIBRARY}"):
                library = bytearray(content)
                blank(library, architecture)
                content = changed[name] = bytes(library)
            elif name.endswith(".dist-info/RECORD"):
                content = _record(content.decode(), changed).encode()
            target.writestr(source.getinfo(name), content, zipfile.ZIP_DEFLATED)
    return slim


def _record(text: str, changed: dict[str, bytes]) -> str:
    return "\n".join(_line(line, changed) for line in text.splitlines()) + "\n"


def _line(line: str, changed: dict[str, bytes]) -> str:
    name = line.split(",", maxsplit=1)[0]
    if name not in changed:
        return line
    digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(changed[name])}"


if __name__ == "__main__":
    made = slim_wheel(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    print(f"{made}: {made.stat().st_size / 2**20:.0f} MiB")
