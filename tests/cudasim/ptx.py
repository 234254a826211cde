"""PTX as data: kernels, their registers and instructions, each with the line of the .cu file that it came from."""

import re
from dataclasses import dataclass, field
from pathlib import Path


class TranslationError(Exception):
    """PTX that the simulator doesn't know; the message names the line of the source."""


@dataclass(frozen=True, slots=True)
class Location:
    """`file` and `line` are the .cu file's where an inlined function of a header came from one; `label` names both.

    Files are named without their folders: what is built does not depend on where the sources lie.
    """

    file: str
    line: int
    label: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """`opcode` split at its dots. `guard` is a predicate register, with "!" in front if negated, or ""."""

    parts: tuple[str, ...]
    operands: tuple["Operand", ...]
    guard: str
    location: Location


Operand = str | tuple[str, ...]
"""A register, number, name or "[address]" as written; a vector's elements."""


@dataclass(frozen=True, slots=True)
class Label:
    """A place to jump to."""

    name: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a kernel."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Variable:
    """An array in .shared, .local, .global or .const memory. `num_bytes` None: the dynamic shared array."""

    space: str
    name: str
    alignment: int
    num_bytes: int | None
    initial: bytes = b""


@dataclass(slots=True)
class Kernel:
    """An entry: `registers` maps names to types without the dot, `jump_tables` names to labels."""

    name: str
    parameters: list[Parameter]
    max_threads: int = 0
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    jump_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    body: list[Instruction | Label] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Module:
    """Everything in one PTX text."""

    kernels: tuple[Kernel, ...]
    variables: tuple[Variable, ...]


def type_bytes(ty: str) -> int:
    """Size of a type such as u32 or pred."""
    return 1 if ty == "pred" else int(ty.lstrip("busf").removesuffix("x2")) // 8


def parse(text: str) -> Module:
    """Raises TranslationError for functions that were not inlined."""
    named = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)
    files = {int(number): Path(path).name for number, path in named}
    text = re.sub(r"//[^\n]*", "", text)
    if function := re.search(r"^\s*(?:\.visible |\.weak |\.extern )*\.func\b[^;{]*?([\w$]+)\s*\(", text, re.M):
        raise TranslationError(f"function {function[1]} was not inlined: mark it __forceinline__")
    kernels = []
    for entry in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text):
        kernel = Kernel(entry[1], _parameters(entry[2]), _max_threads(entry[3]))
        _Body(kernel, files).parse(text[entry.end() : _closing_brace(text, entry.end())])
        kernels.append(kernel)
    outside = re.sub(r"\.entry[^{]*\{.*?^\}", "", text, flags=re.M | re.S)
    declarations = re.findall(r"^\s*((?:\.\w+ )*\.(?:shared|global|const) [^;]*);", outside, re.M)
    return Module(tuple(kernels), tuple(_variable(declaration) for declaration in declarations))


def _parameters(text: str) -> list[Parameter]:
    text = re.sub(r"\.align\s+\d+|\.ptr\b|\.(?:global|shared|const|local)\b", "", text)
    pattern = r"\.param\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?"
    return [Parameter(name, type_bytes(ty) * int(count or 1)) for ty, name, count in re.findall(pattern, text)]


def _max_threads(directives: str) -> int:
    if bound := re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", directives):
        product = 1
        for dim in bound[1].split(","):
            product *= int(dim)
        return product
    return 0


def _closing_brace(text: str, position: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return position - 1


def _variable(text: str) -> Variable:
    match = re.search(
        r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(\[\d*\])?\s*(?:=\s*(.*))?",
        text,
        re.S,
    )
    if not match:
        raise TranslationError(f"unknown declaration: {text}")
    space, alignment, ty, name, length, values = match.groups()
    size = type_bytes(ty)
    count = None if length == "[]" else int(length[1:-1]) if length else 1
    initial = b""
    for value in re.findall(r"[^{},\s]+", values or ""):
        if not re.fullmatch(r"-?\d+|0[xXfFdD][0-9a-fA-F]+", value):
            raise TranslationError(f"initial value {value} of {name}")
        number = int(value[2:], 16) if value[1:2].isalpha() else int(value)
        initial += (number % (1 << size * 8)).to_bytes(size, "little")
    return Variable(space, name, int(alignment or size), count and count * size, initial)


class _Body:
    """Fills a kernel from the text between its braces."""

    def __init__(self, kernel: Kernel, files: dict[int, str]) -> None:
        self._kernel = kernel
        self._files = files
        self._location = Location("?", 0, "?")
        self._inlined: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self._scopes: list[dict[str, str]] = [{}]
        self._num_scopes = 0

    def parse(self, text: str) -> None:
        """Statements end at a semicolon, labels at a colon; braces outside of statements are scopes."""
        text = re.sub(r"^\s*(\.loc[^\n]*)", r"\1;", text, flags=re.M)
        position = 0
        statement = re.compile(r"\s*(?:([{}])|([\w$]+):(?!:)|([^;]*);)", re.S)
        while match := statement.match(text, position):
            position = match.end()
            if match[1] == "{":
                self._num_scopes += 1
                self._scopes.append({})
            elif match[1]:
                self._scopes.pop()
            elif match[2]:
                self._label(match[2], text[position:])
            elif match[3]:
                self._statement(match[3].strip())

    def _label(self, name: str, rest: str) -> None:
        if targets := re.match(r"\s*\.branchtargets\s+([^;]*);", rest):
            self._kernel.jump_tables[name] = tuple(re.findall(r"[\w$]+", targets[1]))
        else:
            self._kernel.body.append(Label(name))

    def _declare(self, name: str) -> str:
        unique = name if len(self._scopes) == 1 else f"{name}__{self._num_scopes}"
        self._scopes[-1][name] = unique
        return unique

    def _statement(self, text: str) -> None:
        if re.match(r"\.loc\s", text):
            self._move_to(text)
        elif registers := re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", text, re.S):
            for name, count in re.findall(r"([%\w$]+)(?:<(\d+)>)?", registers[2]):
                names = [f"{name}{i}" for i in range(int(count))] if count else [name]
                self._kernel.registers.update({self._declare(each): registers[1] for each in names})
        elif re.match(r"\.(shared|local)\b", text):
            self._kernel.variables.append(_variable(text))
        elif not text.startswith("."):
            self._instruction(text)

    def _move_to(self, text: str) -> None:
        numbers = [int(number) for number in re.findall(r"(?<=[\s])\d+", text)]
        place = (numbers[0], numbers[1], numbers[2])
        if "inlined_at" in text:
            self._inlined[place] = (numbers[-3], numbers[-2], numbers[-1])
        else:
            self._inlined.pop(place, None)
        chain = [place]
        while (caller := self._inlined.get(chain[-1])) and caller not in chain:
            chain.append(caller)
        in_cu = next((each for each in chain if self._files.get(each[0], "").endswith(".cu")), place)
        label = self._name(place)
        if in_cu != place:
            label += f" called from {self._name(in_cu)}"
        self._location = Location(self._files.get(in_cu[0], "?"), in_cu[1], label)

    def _name(self, place: tuple[int, int, int]) -> str:
        return f"{self._files.get(place[0], '?')}:{place[1]}"

    def _instruction(self, text: str) -> None:
        match = re.match(r"(?:@(!?[%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if not match:
            raise TranslationError(f"{self._location.label}: can't read {text!r}")
        guard, opcode, rest = match.groups()
        operands = tuple(
            tuple(self._resolve(each) for each in re.findall(r"[^{},\s]+", operand))
            if operand.startswith("{")
            else self._resolve(operand.strip())
            for operand in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
        )
        parts = tuple(opcode.split("."))
        self._kernel.body.append(Instruction(parts, operands, self._resolve(guard or ""), self._location))

    def _resolve(self, text: str) -> str:
        """Names of the innermost scope that declares them."""

        def unique(name: re.Match[str]) -> str:
            for scope in reversed(self._scopes[1:]):
                if name[0] in scope:
                    return scope[name[0]]
            return name[0]

        return re.sub(r"[%\w$.]+", unique, text)
