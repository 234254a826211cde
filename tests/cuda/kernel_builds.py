"""What ptxas says about every kernel on every architecture, and the table of it.

python -m tests.cuda.kernel_builds     writes kernel_resources.md again; minutes
"""

import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from service.errors import ConfigError
from service.executor.cuda.compiler import Compiled, compile_cubin, nvrtc_version
from service.executor.cuda.kernels import (
    BLOCK_SIZES,
    HEAD_DIMS,
    KernelConfig,
    KernelSpec,
    PrefillShape,
    Scalar,
    choose_prefill_shape,
    choose_tile_tokens,
    kernel_specs,
    source_folder,
)

TABLE = Path(__file__).with_name("kernel_resources.md")
# Architecture -> the most shared memory that a block may ask for, from the CUDA C++ Programming Guide.
MAX_SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
SHAPE_MACROS = ("TILE_TOKENS", "PREFILL_ROWS", "PREFILL_WARPS", "PREFILL_TILE_TOKENS")  # the architecture decides them
# Source -> the macros that it depends on, so that nothing is compiled twice.
MACROS = {
    "rope_kv_write.cu": ("SCALAR", "HEAD_DIM", "BLOCK_SIZE", "KV_FP8"),
    "attention.cu": ("SCALAR", "HEAD_DIM", "BLOCK_SIZE", "KV_FP8", *SHAPE_MACROS),
    "attention_combine.cu": ("SCALAR", "HEAD_DIM"),
    "sample_rows.cu": ("LOGIT",),
}


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int
    spilled_bytes: int


@dataclass(frozen=True)
class Variant:
    """A kernel with those of its macros that it depends on, apart from SHAPE_MACROS."""

    kernel: str
    macros: tuple[str, ...]
    config: KernelConfig

    @property
    def name(self) -> str:
        return " ".join((self.kernel, *self.macros))

    def on(self, architecture: str) -> tuple[KernelSpec, KernelConfig]:
        at_hand = (self.config.head_dim, self.config.is_kv_fp8, MAX_SHARED_BYTES[architecture])
        config = replace(self.config, tile_tokens=choose_tile_tokens(*at_hand), prefill=choose_prefill_shape(*at_hand))
        return next(spec for spec in kernel_specs(config) if spec.name == self.kernel), config


def missing_nvrtc() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        nvrtc_version()
    except ConfigError as error:
        return str(error)
    return None


def all_variants() -> Iterator[Variant]:
    seen = set()
    scalars = (Scalar.BF16, Scalar.HALF)
    for scalar, head_dim, block_size, is_fp8, logit in product(scalars, HEAD_DIMS, BLOCK_SIZES, (False, True), Scalar):
        config = KernelConfig(scalar, head_dim, block_size, 32, logit, is_fp8)
        for spec in kernel_specs(config):
            macros = tuple(
                each
                for each in config.definitions
                if each.split("=")[0] in MACROS[spec.source] and each.split("=")[0] not in SHAPE_MACROS
            )
            variant = Variant(spec.name, macros, config)
            if variant.name not in seen:
                seen.add(variant.name)
                yield variant


@cache
def compiled(source: str, architecture: str, definitions: tuple[str, ...]) -> Compiled:
    return compile_cubin(source_folder() / source, architecture, definitions)


def compiled_variant(variant: Variant, architecture: str) -> Compiled:
    spec, config = variant.on(architecture)
    wanted = MACROS[spec.source]
    definitions = tuple(each for each in config.definitions if each.split("=")[0] in wanted)
    return compiled(spec.source, architecture, definitions)


def resources(variant: Variant, architecture: str) -> Resources:
    log = compiled_variant(variant, architecture).log
    match = re.search(
        rf"Compiling entry function '{variant.kernel}' for '{architecture}'"
        r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    assert match is not None, log
    return Resources(int(match[4]), int(match[1]), int(match[2]) + int(match[3]))


def table_row(variant: Variant) -> str:
    cells = []
    for architecture in MAX_SHARED_BYTES:
        used = resources(variant, architecture)
        spec, config = variant.on(architecture)
        shape = {"attn_decode": f" t{config.tile_tokens}", "attn_prefill": _shape(config.prefill)}.get(spec.name, "")
        cells.append(f"{used.registers} {spec.shared_bytes} {used.stack_bytes} {used.spilled_bytes}{shape}")
    return f"| {variant.name} | {' | '.join(cells)} |"


def _shape(prefill: PrefillShape) -> str:
    return f" {prefill.num_rows}/{prefill.num_warps} t{prefill.tile_tokens}"


def table() -> str:
    lines = [
        "# Resources of the kernels",
        "",
        f"As ptxas of NVRTC {nvrtc_version()} reports them: registers a thread, dynamic shared bytes a block, bytes of",
        "stack, bytes spilled; of attention the tokens of a tile (t), in prefill behind rows and warps of a block.",
        "Written by `python -m tests.cuda.kernel_builds`.",
        "",
        f"| kernel | {' | '.join(MAX_SHARED_BYTES)} |",
        "| --- " * (len(MAX_SHARED_BYTES) + 1) + "|",
        *map(table_row, all_variants()),
    ]
    return "\n".join(lines) + "\n"


def committed_rows() -> dict[str, str]:
    """Variant's name -> its row."""
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in rows[2:]}


def committed_version() -> str:
    match = re.search(r"NVRTC (\S+) ", TABLE.read_text())
    assert match is not None
    return match[1]


def disassembler() -> Path | None:
    """nvdisasm of the wheel nvidia-cuda-nvdisasm."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def opcodes(cubin: bytes) -> set[str]:
    """Every instruction of a cubin, with its modifiers."""
    tool = disassembler()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text))


if __name__ == "__main__":
    TABLE.write_text(table())
