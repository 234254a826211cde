"""Compiles a .cu file to PTX with NVRTC: no GPU, no driver, no CUDA toolkit."""

from pathlib import Path

ARCHITECTURE = "sm_90"


class CompileError(Exception):
    """NVRTC refused the source; the message is its log."""


def nvrtc_missing() -> str | None:
    """Why NVRTC can't be used here, or None if it can."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # the loader raises RuntimeError, ImportError or its own, by version
        return f"no NVRTC (wheel nvidia-cuda-nvrtc): {error}"
    return None


def nvrtc_version() -> tuple[int, int]:
    """(major, minor)."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


def compile_ptx(source: Path, options: tuple[str, ...] = ()) -> str:
    """PTX of a file with line numbers. Headers are looked for beside it. Raises CompileError."""
    from cuda.bindings import nvrtc

    flags = [
        # The virtual one: the same PTX, in half the time, because ptxas makes no cubin of it.
        f"--gpu-architecture={ARCHITECTURE.replace('sm', 'compute')}",
        "--std=c++17",
        "--generate-line-info",
        f"--include-path={source.parent}",
        *options,
    ]
    _, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), str(source).encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        _, num_bytes = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(num_bytes)
        nvrtc.nvrtcGetProgramLog(program, log)
        if int(status):
            raise CompileError(_text(log))
        _, num_bytes = nvrtc.nvrtcGetPTXSize(program)
        ptx = bytearray(num_bytes)
        nvrtc.nvrtcGetPTX(program, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return _text(ptx)


def _text(buffer: bytearray) -> str:
    return bytes(buffer).rstrip(b"\0").decode(errors="replace")
