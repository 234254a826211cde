"""Compiles CUDA sources with NVRTC: to a cubin for one architecture, never to PTX that a driver would compile again.

A driver refuses PTX that is newer than itself, while it runs the cubins of every compiler of its own major version.
NVRTC comes from the wheel nvidia-cuda-nvrtc and needs neither a GPU nor a driver.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from cuda.bindings import nvrtc

from service.errors import ConfigError

log = structlog.get_logger("chairlift.cuda")

_OPTIONS: Final = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
_CHECKSUM_BYTES: Final = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, and what the compiler said: with ptxas's lines on registers, stack and spills."""

    cubin: bytes
    log: str


def nvrtc_version() -> str:
    """As in "13.5". Raises ConfigError when NVRTC is not installed."""
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # what the loader raises changes with its version
        raise ConfigError("NVRTC cannot be loaded: install chairlift[cuda]") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ConfigError(f"NVRTC does not tell its version: {status!r}")
    return f"{major}.{minor}"


def compile_cubin(source: Path, architecture: str, definitions: tuple[str, ...] = ()) -> Compiled:
    """Compile `source` for an architecture like "sm_90"; headers lie beside it, `definitions` are like "HEAD_DIM=64".

    Raises ConfigError with the compiler's log when the source does not compile.
    """
    nvrtc_version()
    flags = [f"--gpu-architecture={architecture}", f"--include-path={source.parent}", *_OPTIONS]
    flags += [f"--define-macro={definition}" for definition in definitions]
    status, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    _require(status, "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _log(program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ConfigError(f"{source.name} does not compile for {architecture}:\n{log}")
        status, num_bytes = nvrtc.nvrtcGetCUBINSize(program)
        _require(status, "nvrtcGetCUBINSize")
        cubin = bytearray(num_bytes)
        _require(nvrtc.nvrtcGetCUBIN(program, cubin)[0], "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(bytes(cubin), log)


class CubinCache:
    """Cubins in a folder, made on first use. Any number of processes may share it.

    A folder that cannot be written to, or read, costs the time of compiling at every start and nothing else. A file is
    a cubin with its SHA-256 behind it: a driver is not told how long a cubin is, and would read past the end of half of
    one.
    """

    def __init__(self, folder: Path | None) -> None:
        """Nothing is kept when `folder` is None."""
        self._folder = folder

    @classmethod
    def open(cls, folder: str) -> "CubinCache":
        """The cache in a folder as a user spells it. When that is below a home that nobody knows, nothing is kept."""
        try:
            return cls(Path(folder).expanduser())
        except RuntimeError as error:  # as in a container whose user has neither an entry in passwd nor HOME
            log.warning("cuda.kernels_not_kept", folder=folder, error=str(error))
            return cls(None)

    def cubin(self, source: Path, architecture: str, definitions: tuple[str, ...] = ()) -> bytes:
        """The cubin of `source`, from the folder if it holds one. Raises ConfigError as `compile_cubin` does."""
        return self.kept(source, architecture, definitions) or self.compile(source, architecture, definitions)

    def kept(self, source: Path, architecture: str, definitions: tuple[str, ...] = ()) -> bytes | None:
        """What the folder holds of the same source, headers, options and compiler; None for nothing that is whole."""
        if self._folder is None:
            return None
        target = _target(self._folder, source, architecture, definitions)
        try:
            stored = target.read_bytes()
        except OSError:
            return None
        cubin, checksum = stored[:-_CHECKSUM_BYTES], stored[-_CHECKSUM_BYTES:]
        if checksum != hashlib.sha256(cubin).digest():
            log.warning("cuda.kept_kernels_damaged", source=source.name, file=str(target))
            return None
        return cubin

    def compile(self, source: Path, architecture: str, definitions: tuple[str, ...] = ()) -> bytes:
        """A new cubin of `source`, which takes the place of what the folder holds. Raises ConfigError."""
        cubin = compile_cubin(source, architecture, definitions).cubin
        if self._folder is None:
            return cubin
        try:
            _write(_target(self._folder, source, architecture, definitions), cubin)
        except OSError as error:  # as in a container whose root is read-only
            log.warning("cuda.kernels_not_kept", source=source.name, folder=str(self._folder), error=str(error))
        return cubin


def _target(folder: Path, source: Path, architecture: str, definitions: tuple[str, ...]) -> Path:
    return folder / f"{source.stem}-{architecture}-{_digest(source, architecture, definitions)}.cubin"


def _write(target: Path, cubin: bytes) -> None:
    # Renamed when it is whole: a reader sees all of a file or none, and the last of two writers wins.
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}-", suffix=".unfinished")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin + hashlib.sha256(cubin).digest())
        Path(unfinished).replace(target)
    except OSError:
        Path(unfinished).unlink(missing_ok=True)
        raise


def _digest(source: Path, architecture: str, definitions: tuple[str, ...]) -> str:
    parts = [part.encode() for part in (nvrtc_version(), architecture, *_OPTIONS, *definitions)]
    for path in (source, *sorted(source.parent.glob("*.cuh"))):
        parts += [path.name.encode(), path.read_bytes()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _log(program: nvrtc.nvrtcProgram) -> str:
    status, num_bytes = nvrtc.nvrtcGetProgramLogSize(program)
    _require(status, "nvrtcGetProgramLogSize")
    log = bytearray(num_bytes)
    _require(nvrtc.nvrtcGetProgramLog(program, log)[0], "nvrtcGetProgramLog")
    return log.rstrip(b"\0").decode(errors="replace").strip()


def _require(status: nvrtc.nvrtcResult, function: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ConfigError(f"{function} failed: {status!r}")
