"""What the translator does not know is an error that names the line; it never guesses."""

from pathlib import Path

import pytest

from tests.cudasim.build import missing_tool
from tests.cudasim.nvrtc import CompileError, compile_ptx
from tests.cudasim.ptx import TranslationError, parse
from tests.cudasim.translate import translate

if reason := missing_tool():
    pytest.skip(reason, allow_module_level=True)


def translated(folder: Path, body: str, before: str = "") -> str:
    source = folder / "kernel.cu"
    source.write_text(f'{before}\nextern "C" __global__ void kernel(unsigned* out) {{\n{body}\n}}\n')
    return translate(parse(compile_ptx(source)))


@pytest.mark.parametrize(
    "instruction",
    [
        "prmt.b32.f4e %0, %1, %1, 1;",
        "dp4a.u32.u32 %0, %1, %1, %1;",
        "ex2.approx.f16x2 %0, %1;",
        "mov.u32 %0, %%clock;",
        "activemask.b32 %0;",
        "cvt.pack.sat.s16.s32 %0, %1, %1;",
        "cvt.rz.bf16x2.f32 %0, 0f00000000, 0f00000000;",
        "fma.rn.relu.f16x2 %0, %1, %1, %1;",
    ],
)
def test_an_unknown_instruction_names_its_line(tmp_path: Path, instruction: str) -> None:
    body = f'  unsigned r, x = threadIdx.x;\n  asm volatile("{instruction}" : "=r"(r) : "r"(x));\n  out[x] = r;'
    with pytest.raises(TranslationError, match=r"^kernel.cu:4: (unknown instruction|unknown operand)"):
        translated(tmp_path, body)


def test_a_function_that_was_not_inlined_is_named(tmp_path: Path) -> None:
    with pytest.raises(TranslationError, match=r"square.* was not inlined"):
        translated(tmp_path, "  out[0] = square(out[1]);",
                   "__device__ __noinline__ unsigned square(unsigned x) { return x * x; }")  # fmt: skip


def test_an_error_of_the_compiler_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"kernel.cu\(3\): error: identifier \"nonsense\""):
        translated(tmp_path, "  nonsense = 1;")


def test_scopes_of_inline_ptx_have_registers_of_their_own(tmp_path: Path) -> None:
    body = '  asm volatile("{ .reg .u32 x; mov.u32 x, 1; st.global.u32 [%0], x; }" :: "l"(out));\n' * 2
    module = parse(compile_ptx_of(tmp_path, body))
    assert 2 == sum(name.startswith("x") for name in module.kernels[0].registers)


def compile_ptx_of(folder: Path, body: str) -> str:
    source = folder / "kernel.cu"
    source.write_text(f'extern "C" __global__ void kernel(unsigned* out) {{\n{body}\n}}\n')
    return compile_ptx(source)
