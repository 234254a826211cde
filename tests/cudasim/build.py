"""Builds the simulator and translated kernels with g++, each in the flavours that tests ask for.

Everything built is kept under .cache/cudasim, named by a hash of all that went into it.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.cudasim.nvrtc import compile_ptx, nvrtc_missing, nvrtc_version
from tests.cudasim.ptx import parse
from tests.cudasim.translate import translate

HERE = Path(__file__).parent
RUNTIME = HERE / "runtime"
CACHE = HERE.parents[1] / ".cache" / "cudasim"
FLAGS = (
    "-std=c++17",
    "-w",
    "-fPIC",
    "-shared",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-tree-loop-distribute-patterns",  # memset and memcpy are the sanitizers' own: loops stay loops
)
# Kernels are compiled for a few launches each: g++ takes two thirds of what -O1 takes. The simulator runs in them all.
KERNEL_FLAGS, RUNTIME_FLAGS = (*FLAGS, "-Og"), (*FLAGS, "-O2")
# flavour -> (flags of kernels, flags of the simulator)
FLAVOURS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ()),
    # Scopes would be those of the C++, not of the kernel, and watching them makes g++ twenty times slower.
    "asan": (
        ("-fsanitize=address", "-fno-sanitize-address-use-after-scope", "-g1", "-fno-var-tracking"),
        ("-DSIM_ADDRESS",),
    ),
    "tsan": (("-fsanitize=thread", "-g1", "-fno-var-tracking"), ("-DSIM_THREAD",)),
}
SANITIZERS = {"asan": "libasan.so", "tsan": "libtsan.so"}


class BuildError(Exception):
    """g++ failed; the message is its output."""


def missing_tool() -> str | None:
    """Why nothing can be simulated here, or None."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the simulator switches fibers on x86-64 Linux only"
    if shutil.which("g++") is None:
        return "no g++"
    return nvrtc_missing()


def missing_sanitizer(flavour: str) -> str | None:
    """Why a flavour can't run here, or None."""
    if flavour in SANITIZERS and not sanitizer_library(flavour).is_file():
        return f"this g++ has no {SANITIZERS[flavour]}"
    return None


def sanitizer_library(flavour: str) -> Path:
    """The library to be loaded before everything else in a process that runs the flavour."""
    return compiler_library(SANITIZERS[flavour])


def compiler_library(name: str) -> Path:
    """The compiler's own copy of a shared library."""
    command = ["g++", f"-print-file-name={name}"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


@cache
def compiler_version() -> str:
    """What g++ calls itself, in full: versions of one number differ between distributions."""
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def runtime_library(flavour: str) -> Path:
    """The simulator, built on first use."""
    sources = sorted(RUNTIME.iterdir())
    flags = (*RUNTIME_FLAGS, *FLAVOURS[flavour][1])
    digest = _hash([*_contents(sources), *map(str.encode, (*flags, compiler_version()))])
    target = CACHE / f"simulator-{digest}-{flavour}.so"
    with _Building(target) as missing:
        if missing:
            _compile([path for path in sources if path.suffix == ".cc"], target, flags)
    return target


def kernel_library(source: Path, options: tuple[str, ...], flavour: str) -> Path:
    """The kernels of a .cu file, built on first use; it wants the simulator's symbols when it is loaded.

    Raises CompileError, TranslationError or BuildError.
    """
    inputs = sorted(
        (*source.parent.glob("*.cuh"), *source.parent.glob("*.h"), *HERE.glob("*.py"), *RUNTIME.glob("*.h"))
    )
    names = [source.name, *options, *KERNEL_FLAGS, *FLAVOURS[flavour][0], str(nvrtc_version()), compiler_version()]
    digest = _hash([source.read_bytes(), *_contents(inputs), *map(str.encode, names)])
    target = CACHE / f"{source.stem}-{digest}-{flavour}.so"
    with _Building(target) as missing:
        if missing and flavour in SANITIZERS:
            _build_elsewhere(source, options, flavour, target)
        elif missing:
            build_kernels(source, options, flavour, target)
    return target


def build_kernels(source: Path, options: tuple[str, ...], flavour: str, target: Path) -> None:
    """Write the library of a .cu file to `target`."""
    cpp = target.with_suffix(".cpp")
    cpp.write_text(translate(parse(compile_ptx(source, options))))
    _compile([cpp], target, (*KERNEL_FLAGS, *FLAVOURS[flavour][0]))
    cpp.unlink()


def _build_elsewhere(source: Path, options: tuple[str, ...], flavour: str, target: Path) -> None:
    """NVRTC can't find its own files in a process that a sanitizer was loaded into."""
    command = [sys.executable, "-m", "tests.cudasim.build", str(source), flavour, str(target), *options]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(result.stderr[-6000:])


class _Building:
    """Enters with whether a file must be made; two processes never make the same one at once."""

    def __init__(self, target: Path) -> None:
        self._target = target
        CACHE.mkdir(parents=True, exist_ok=True)
        self._lock = target.with_suffix(".lock").open("w")

    def __enter__(self) -> bool:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return not self._target.exists()

    def __exit__(self, *_: object) -> None:
        self._lock.close()  # the file stays: another process may wait for it, and a third would make a new one


def _contents(paths: Iterable[Path]) -> list[bytes]:
    return [path.name.encode() + path.read_bytes() for path in paths]


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _compile(sources: list[Path], target: Path, flags: tuple[str, ...]) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    command = ["g++", *flags, f"-I{RUNTIME}", *map(str, sources), "-o", str(unfinished)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        unfinished.unlink(missing_ok=True)
        raise BuildError(result.stderr[-6000:])
    unfinished.rename(target)


if __name__ == "__main__":
    build_kernels(Path(sys.argv[1]), tuple(sys.argv[4:]), sys.argv[2], Path(sys.argv[3]))
