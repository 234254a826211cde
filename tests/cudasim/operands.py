"""Registers, numbers and names of PTX as C++ expressions.

Every register is a C++ variable of its width, unsigned; instructions say how they read it.
"""

import re
from collections.abc import Mapping

from tests.cudasim.ptx import Instruction, Operand, TranslationError, type_bytes

SPECIAL = {
    "%laneid": "sim::self->lane",
    "%warpid": "sim::self->warp",
    "%nwarpid": "((sim::grid.block_dim.x * sim::grid.block_dim.y * sim::grid.block_dim.z + 31) / 32)",
    "%smid": "0u",
    "%nsmid": "1u",
    "%lanemask_eq": "(1u << sim::self->lane)",
    "%lanemask_lt": "((1u << sim::self->lane) - 1)",
    "%lanemask_le": "((2u << sim::self->lane) - 1)",
    "%lanemask_gt": "~((2u << sim::self->lane) - 1)",
    "%lanemask_ge": "~((1u << sim::self->lane) - 1)",
    "%dynamic_smem_size": "sim::grid.dynamic_shared_bytes",
    "%total_smem_size": "sim::grid.total_shared_bytes",
}
INDEX = {"tid": "self->tid", "ctaid": "grid.block", "ntid": "grid.block_dim", "nctaid": "grid.grid_dim"}
FLOATS = {"f32": "float", "f64": "double"}
NARROW = {"f16": "ptx::half", "bf16": "ptx::bf16"}
PAIRS = {f"{name}x2": f"ptx::pair<{narrow}>" for name, narrow in NARROW.items()}


def ctype(ty: str) -> str:
    """The C++ type of a PTX type; .b types are unsigned."""
    if ty == "pred":
        return "bool"
    if known := (FLOATS | NARROW | PAIRS).get(ty):
        return known
    if not re.fullmatch(r"[bsu](8|16|32|64)", ty):
        raise KeyError(ty)
    return f"{'int' if ty[0] == 's' else 'uint'}{ty[1:]}_t"


def bits_type(ty: str) -> str:
    """The unsigned C++ type of a register, or of a memory cell, of a PTX type."""
    return "bool" if ty == "pred" else f"uint{type_bytes(ty) * 8}_t"


def identifier(name: str) -> str:
    """A C++ name of a PTX name; labels and registers don't meet, since C++ keeps labels apart."""
    return "v_" + re.sub(r"\W", "_", name.replace("%", ""))


class Operands:
    """Reads and writes the operands of one instruction."""

    def __init__(self, instruction: Instruction, registers: Mapping[str, str], symbols: Mapping[str, str]) -> None:
        self._instruction = instruction
        self._registers = registers
        self._symbols = symbols

    @property
    def where(self) -> str:
        """The location as a C++ literal."""
        return f'"{self._instruction.location.label}"'

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode, split at its dots."""
        return self._instruction.parts

    @property
    def type(self) -> str:
        """The last part of the opcode."""
        return self._instruction.parts[-1]

    @property
    def count(self) -> int:
        """Number of operands."""
        return len(self._instruction.operands)

    def __getitem__(self, index: int) -> Operand:
        return self._instruction.operands[index]

    def error(self, why: str) -> TranslationError:
        """To be raised."""
        return TranslationError(f"{self._instruction.location.label}: {why}: {'.'.join(self.parts)}")

    def unknown(self) -> TranslationError:
        """To be raised for an instruction, or a form of one, that nobody has taught the simulator."""
        return self.error("unknown instruction")

    def is_predicate(self, index: int) -> bool:
        """Whether an operand is a predicate register."""
        name = self[index]
        return isinstance(name, str) and self._registers.get(name.lstrip("!")) == "pred"

    def register_bits(self, name: str) -> int:
        """Width of a register."""
        return type_bytes(self._registers[name]) * 8

    def text(self, index: int) -> str:
        """An operand that is no vector."""
        operand = self[index]
        if not isinstance(operand, str):
            raise self.unknown()
        return operand

    def vector(self, index: int) -> tuple[str, ...]:
        """The elements of an operand, which may be one alone."""
        operand = self[index]
        return (operand,) if isinstance(operand, str) else operand

    def read(self, index: int, ty: str) -> str:
        """Operand `index` as an expression of type `ctype(ty)`."""
        return self.value(self.text(index), ty)

    def value(self, text: str, ty: str) -> str:
        """A register, number or name as an expression of type `ctype(ty)`."""
        if text.lstrip("!") in self._registers:
            return self._register(text, ty)
        if ty in FLOATS:
            if literal := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
                return f"ptx::f{'32' if len(literal[1]) == 8 else '64'}(0x{literal[1]}u)"
            if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
                return f"{ctype(ty)}({text})"
            return f"ptx::{ty}({self._integer(text, 'u' + ty[1:])})"
        if ty in NARROW:
            return f"{ctype(ty)}{{{self._integer(text, 'u16')}}}"
        if ty in PAIRS:
            return f"ptx::bit_cast<{ctype(ty)}>({self._integer(text, 'u32')})"
        return self._integer(text, ty)

    def _register(self, text: str, ty: str) -> str:
        name = identifier(text.lstrip("!"))
        if ty == "pred":
            return ("!" if text[0] == "!" else "") + name
        if ty in FLOATS:
            return f"ptx::{ty}({name})"
        if ty in NARROW:
            return f"{ctype(ty)}{{(uint16_t){name}}}"
        if ty in PAIRS:
            return f"ptx::bit_cast<{ctype(ty)}>((uint32_t){name})"
        return f"({ctype(ty)}){name}"

    def _integer(self, text: str, ty: str) -> str:
        kind = ctype(ty)
        if text in SPECIAL:
            return f"({kind}){SPECIAL[text]}"
        if index := re.fullmatch(r"%(tid|ctaid|ntid|nctaid)\.([xyz])", text):
            return f"({kind})sim::{INDEX[index[1]]}.{index[2]}"
        if literal := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            return f"({kind})0x{literal[1]}ull"
        name, _, offset = text.replace(" ", "").partition("+")
        if name in self._symbols:
            return f"({kind})({self._symbols[name]} + {int(offset or 0)})"
        try:
            number = int(text.rstrip("U"), 0) if not re.fullmatch(r"0[0-7]+", text) else int(text, 8)
        except ValueError:
            raise self.error(f"unknown operand {text}") from None
        return f"({kind}){number % (1 << 64)}ull"

    def write(self, index: int, expression: str, ty: str) -> str:
        """Statement that puts an expression of type `ctype(ty)` into operand `index`."""
        return self.assign(self.text(index), expression, ty)

    def assign(self, name: str, expression: str, ty: str) -> str:
        """The same for a register. Narrow integers are extended to the register as their sign says."""
        if name == "_":
            return f"(void)({expression});"
        if name not in self._registers:
            raise self.error(f"{name} is no register")
        kind = self._registers[name]
        if ty in FLOATS or ty in NARROW or ty in PAIRS:
            return f"{identifier(name)} = ptx::bits({expression});"
        return f"{identifier(name)} = ({bits_type(kind)})({ctype(ty)})({expression});"

    def address(self, index: int) -> str:
        """The number in "[register + offset]"."""
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", self.text(index))
        if not match:
            raise self.error(f"unknown address {self.text(index)}")
        return f"({self.value(match[1], 'u64')} + {int(match[2] or '0', 0)}ll)"
