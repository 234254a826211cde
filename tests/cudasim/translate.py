"""PTX to C++ that runs on the simulator in runtime/. An unknown instruction is an error: nothing is ever guessed."""

from collections import defaultdict

from tests.cudasim import arithmetic, conversion, memory, warp
from tests.cudasim.arithmetic import Emitter
from tests.cudasim.operands import Operands, bits_type, identifier
from tests.cudasim.ptx import Instruction, Kernel, Label, Location, Module, TranslationError, Variable

EMITTERS: dict[str, Emitter] = {
    **arithmetic.INSTRUCTIONS,
    **conversion.INSTRUCTIONS,
    **memory.INSTRUCTIONS,
    **warp.INSTRUCTIONS,
}
# Between shared arrays lie bytes that belong to none, so that running over an array's end is seen.
GAP_BYTES = 64
STATIC_LIMIT_BYTES = 48 * 1024


def translate(module: Module) -> str:
    """The C++ source of a module: a sim::Kernel named kernel_NAME for every entry. Raises TranslationError."""
    lines = ['#include "kernel.h"']
    lines += [_global(variable) for variable in module.variables if variable.space != "shared"]
    for kernel in module.kernels:
        lines += _Function(kernel, module.variables).lines()
    names = " ".join(kernel.name for kernel in module.kernels)
    lines.append(f'extern "C" const char kernel_names[] = "{names}";')
    return "\n".join(lines) + "\n"


def _global(variable: Variable) -> str:
    size = variable.num_bytes or 0
    values = ", ".join(str(byte) for byte in variable.initial)
    name = identifier(variable.name)
    return f"alignas({max(variable.alignment, 8)}) static unsigned char {name}[{size}] = {{{values}}};"


class _Function:
    """One kernel as a C++ function."""

    def __init__(self, kernel: Kernel, variables: tuple[Variable, ...]) -> None:
        self._kernel = kernel
        names = {name for each in kernel.body if isinstance(each, Instruction) for name in _names(each)}
        used = [variable for variable in variables if variable.name in names]
        self._shared = [each for each in (*kernel.variables, *used) if each.space == "shared"]
        self._local = [each for each in kernel.variables if each.space == "local"]
        self._offsets = _shared_offsets(kernel, self._shared)
        self._symbols = {
            **{each.name: f"(sim::shared_base + {self._offsets[each.name]})" for each in self._shared},
            **{
                each.name: f"(uint64_t)(uintptr_t){identifier(each.name)}"
                for each in (*self._local, *used)
                if each.space != "shared"
            },
            **{each.name: f"(uint64_t)(uintptr_t)arguments_[{i}]" for i, each in enumerate(kernel.parameters)},
        }

    def lines(self) -> list[str]:
        kernel, name = self._kernel, self._kernel.name
        declared = defaultdict(list)
        for register, ty in kernel.registers.items():
            declared[_declared_type(ty)].append(identifier(register))
        return [
            '#line 1 "simulator"',
            f"static void run_{name}(void** arguments_) {{",
            "uint64_t branches_ = 0; bool carry_ = false; (void)carry_; (void)branches_;",
            *(f"{ty} {', '.join(names)};" for ty, names in declared.items()),
            *(f"alignas(16) char {identifier(each.name)}[{each.num_bytes}];" for each in self._local),
            *self._body(),
            "}",
            *self._description(),
        ]

    def _body(self) -> list[str]:
        """All code of one location on one line, so that the compiler counts no further."""
        lines: list[str] = []
        seen: set[str] = set()
        location: Location | None = None
        for each in self._kernel.body:
            if isinstance(each, Label):
                seen.add(each.name)
                code = f"{identifier(each.name)}:;"
            else:
                if each.location != location:
                    location = each.location
                    lines += [f'#line {location.line} "{location.file}"', ""]
                code = self._guarded(each, self._statement(each, seen))
            if not lines:
                lines.append("")
            lines[-1] += " " + code
        return lines

    def _guarded(self, instruction: Instruction, code: str) -> str:
        if not instruction.guard:
            return code
        x = Operands(instruction, self._kernel.registers, self._symbols)
        return f"if ({x.value(instruction.guard, 'pred')}) {{ {code} }}"

    def _statement(self, instruction: Instruction, seen: set[str]) -> str:
        x = Operands(instruction, self._kernel.registers, self._symbols)
        name = instruction.parts[0]
        try:
            if name in EMITTERS:
                return EMITTERS[name](x)
            return self._control(x, name, seen)
        except (KeyError, IndexError, ValueError) as error:
            raise x.unknown() from error

    def _control(self, x: Operands, name: str, seen: set[str]) -> str:
        """Jumps and ends."""
        if name == "bra":
            return self._jump(x, x.text(0), seen)
        if name == "brx":
            targets = enumerate(self._kernel.jump_tables[x.text(1)])
            cases = " ".join(f"case {i}: {self._jump(x, target, seen)}" for i, target in targets)
            return f'switch ({x.read(0, "u32")}) {{ {cases} default: sim::fail({x.where}, "jump beyond its table"); }}'
        if name in ("ret", "exit"):
            return "return;"
        if name == "trap":
            return f'sim::fail({x.where}, "trap");'
        if name == "nanosleep":
            return f"sim::spin({x.where}, ++branches_);"
        if name == "griddepcontrol":  # launches don't overlap
            return ";"
        raise x.unknown()

    def _jump(self, x: Operands, label: str, seen: set[str]) -> str:
        """A jump backwards counts, so that a loop without end is found and a spinning thread lets others run."""
        count = f"if (!(++branches_ & 1023)) sim::spin({x.where}, branches_); " if label in seen else ""
        return f"{count}goto {identifier(label)};"

    def _description(self) -> list[str]:
        kernel, name = self._kernel, self._kernel.name
        sizes = ", ".join(str(parameter.num_bytes) for parameter in kernel.parameters) or "0"
        arrays = (
            ", ".join(f"{{{self._offsets[each.name]}, {each.num_bytes or 0}}}" for each in self._shared) or "{0, 0}"
        )
        limit = STATIC_LIMIT_BYTES - sum(each.num_bytes or 0 for each in self._shared)
        return [
            f"static const uint32_t parameters_{name}[] = {{{sizes}}};",
            f"static const sim::SharedArray arrays_{name}[] = {{{arrays}}};",
            f'extern "C" sim::Kernel kernel_{name} = {{"{name}", run_{name}, {len(kernel.parameters)}, '
            f"{len(self._shared)}, {kernel.max_threads}, parameters_{name}, arrays_{name}, {limit}}};",
        ]


def _declared_type(ty: str) -> str:
    return "unsigned __int128" if ty == "b128" else bits_type(ty)


def _names(instruction: Instruction) -> set[str]:
    """Every word in the operands that may name a variable."""
    text = " ".join(each if isinstance(each, str) else " ".join(each) for each in instruction.operands)
    return set(text.replace("[", " ").replace("]", " ").replace("+", " ").split())


def _shared_offsets(kernel: Kernel, arrays: list[Variable]) -> dict[str, int]:
    """Offsets in shared memory, the dynamic array last. Each is aligned to what it declares and to no more."""
    offsets: dict[str, int] = {}
    cursor = 0
    static = sum(each.num_bytes or 0 for each in arrays)
    if static > STATIC_LIMIT_BYTES:
        raise TranslationError(f"kernel {kernel.name}: {static} bytes of static shared memory")
    dynamic = [each for each in arrays if each.num_bytes is None]
    for each in sorted(arrays, key=lambda variable: variable.num_bytes is None):
        if dynamic and each is not dynamic[0] and each.num_bytes is None:
            offsets[each.name] = offsets[dynamic[0].name]  # all dynamic arrays begin at one place
            continue
        alignment = max(v.alignment for v in dynamic) if each.num_bytes is None else each.alignment
        while cursor % (2 * alignment) != alignment:
            cursor += 1
        offsets[each.name] = cursor
        cursor += (each.num_bytes or 0) + GAP_BYTES
    return offsets
