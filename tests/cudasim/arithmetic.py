"""Instructions that concern a thread's registers only."""

from collections.abc import Callable

from tests.cudasim.operands import FLOATS, Operands, ctype

Emitter = Callable[[Operands], str]

ROUNDING = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
# The name of an instruction whose operands and result all have the type at its end -> C++ function, number of operands.
UNIFORM = {
    "add": ("add", 2), "sub": ("sub", 2), "min": ("min", 2), "max": ("max", 2), "neg": ("neg", 1), "abs": ("abs", 1),
    "fma": ("fma", 3), "copysign": ("copysign", 2), "and": ("and_", 2), "or": ("or_", 2), "xor": ("xor_", 2),
    "not": ("not_", 1), "cnot": ("cnot", 1), "brev": ("brev", 1), "ex2": ("ex2", 1), "lg2": ("lg2", 1),
    "sin": ("sin", 1), "cos": ("cos", 1), "tanh": ("tanh", 1), "rcp": ("rcp", 1), "sqrt": ("sqrt", 1),
    "rsqrt": ("rsqrt", 1), "lop3": ("lop3", 4), "prmt": ("prmt", 3),
}  # fmt: skip
COMPARISON = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="
}  # fmt: skip
OF_NARROW_FLOATS = {"add", "sub", "min", "max", "neg", "abs", "fma"}


def expect_parts(x: Operands, allowed: set[str]) -> None:
    """Raise for any part of the opcode between its name and its type that is not among `allowed`."""
    if not set(x.parts[1:-1]) <= allowed:
        raise x.unknown()


def float_result(x: Operands, expression: str) -> str:
    """Statement for a float result with .sat and .ftz."""
    if "sat" in x.parts:
        expression = f"ptx::saturate({expression})"
    if "ftz" in x.parts and x.type == "f32":
        expression = f"ptx::flush({expression})"
    return x.write(0, expression, x.type)


def sources(x: Operands, count: int) -> list[str]:
    """The operands behind the first, in the type of the instruction."""
    values = [x.read(i, x.type) for i in range(1, count + 1)]
    return [f"ptx::flush({value})" for value in values] if "ftz" in x.parts and x.type == "f32" else values


def uniform(x: Operands) -> str:
    """One C++ function of the instruction's type."""
    name, count = UNIFORM[x.parts[0]]
    rounding = next((ROUNDING[part] for part in x.parts[1:-1] if part in ("rz", "rm", "rp")), None)
    expect_parts(x, {"ftz", "sat", "approx", "rn", "rz", "rm", "rp", "NaN"})
    if x.parts[0] in ("add", "sub") and x.type == "s32" and "sat" in x.parts:
        sign = {"add": "+", "sub": "-"}[x.parts[0]]
        return x.write(0, f"ptx::saturate((int64_t){x.read(1, 's32')} {sign} (int64_t){x.read(2, 's32')})", "s32")
    is_float = x.type in FLOATS
    if (
        x.count != count + 1
        or (rounding and (x.type != "f32" or name not in ("add", "sub", "fma")))
        or ({"sat", "ftz", "NaN"} & set(x.parts) and not is_float)
        or (not is_float and "f16" in x.type and name not in OF_NARROW_FLOATS)
    ):
        raise x.unknown()
    values = sources(x, count)
    if rounding and name == "sub":
        name, values[1] = "add", f"-{values[1]}"
    call = f"ptx::{name}{'_nan' if 'NaN' in x.parts else ''}{'_rounded' if rounding else ''}"
    return float_result(x, f"{call}({', '.join([*values, *([rounding] if rounding else [])])})")


def multiply(x: Operands) -> str:
    """mul and mad: .lo, .hi and .wide of integers, and floats."""
    ty, is_sum = x.type, x.parts[0] == "mad"
    if ty[0] not in "su":
        rounding = next((ROUNDING[part] for part in x.parts[1:-1] if part in ("rz", "rm", "rp")), None)
        expect_parts(x, {"ftz", "sat", "rn", "rz", "rm", "rp"})
        values = sources(x, 3 if is_sum else 2)
        name = "fma" if is_sum else "mul"
        if x.type != "f32" and (rounding or {"ftz", "sat"} & set(x.parts)):
            raise x.unknown()
        if rounding:
            name, values = f"{name}_rounded", [*values, rounding]
        return float_result(x, f"ptx::{name}({', '.join(values)})")
    expect_parts(x, {"lo", "hi", "wide"})
    a, b, part = x.read(1, ty), x.read(2, ty), x.parts[1]
    result = ty[0] + str(int(ty[1:]) * 2) if part == "wide" else ty
    if part == "wide":
        product = f"({ctype(result)}){a} * ({ctype(result)}){b}"
    else:
        product = f"ptx::mul_hi({a}, {b})" if part == "hi" else f"ptx::mul({a}, {b})"
    return x.write(0, f"{product} + {x.read(3, result)}" if is_sum else product, result)


def divide(x: Operands) -> str:
    """div and rem; an integer divisor of zero ends the launch."""
    expect_parts(x, {"approx", "full", "rn", "ftz"})
    a, b = sources(x, 2)
    if x.type not in FLOATS:
        b = f"sim::divisor({x.where}, {b})"
    return float_result(x, f"ptx::{x.parts[0]}({a}, {b})")


def shift(x: Operands) -> str:
    """shl and shr; distances beyond the width are clamped."""
    expect_parts(x, set())
    return x.write(0, f"ptx::{x.parts[0]}({x.read(1, x.type)}, {x.read(2, 'u32')})", x.type)


def funnel_shift(x: Operands) -> str:
    """shf.l and shf.r."""
    distance = x.read(3, "u32")
    distance = f"{distance} & 31" if "wrap" in x.parts else f"ptx::min<uint32_t>({distance}, 32)"
    return x.write(0, f"ptx::shf_{x.parts[1]}({x.read(1, 'u32')}, {x.read(2, 'u32')}, {distance})", "u32")


def count_bits(x: Operands) -> str:
    """popc, clz and bfind, whose results have 32 bits."""
    name = "bfind_shiftamt" if "shiftamt" in x.parts else x.parts[0]
    return x.write(0, f"ptx::{name}({x.read(1, x.type)})", "u32")


def bit_field(x: Operands) -> str:
    """bfe and bfi, whose positions and lengths have 32 bits."""
    count = 1 if x.parts[0] == "bfe" else 2
    fields = [x.read(i + 1, x.type) for i in range(count)] + [x.read(i + 1, "u32") for i in range(count, count + 2)]
    return x.write(0, f"ptx::{x.parts[0]}({', '.join(fields)})", x.type)


def comparison(x: Operands, operator: str, first: int) -> str:
    """`a operator b` as an expression. An operator such as `ltu` holds for NaN too."""
    ty = x.type
    a, b = x.read(first, ty), x.read(first + 1, ty)
    if ty in ("f16", "bf16"):
        a, b = f"ptx::to_float({a})", f"ptx::to_float({b})"
    if "ftz" in x.parts:
        a, b = f"ptx::flush({a})", f"ptx::flush({b})"
    unordered = f"({a} != {a} || {b} != {b})"
    if operator in ("num", "nan"):
        return unordered if operator == "nan" else f"!{unordered}"
    is_float = ty[0] == "f" or ty == "bf16"
    if is_float and operator == "ne":
        return f"({a} != {b} && !{unordered})"
    if is_float and operator.endswith("u") and operator[:-1] in COMPARISON:
        return f"({a} {COMPARISON[operator[:-1]]} {b} || {unordered})"
    if operator not in COMPARISON:
        raise x.unknown()
    return f"({a} {COMPARISON[operator]} {b})"


def compare(x: Operands) -> str:
    """setp, with a second result and a combination with a third predicate, if it has them."""
    result = comparison(x, x.parts[1], 1)
    combine = next((part for part in x.parts[2:-1] if part in ("and", "or", "xor")), None)
    expect_parts(x, {x.parts[1], "ftz", "and", "or", "xor"})
    yes, _, no = x.text(0).partition("|")
    both = [(yes, "t_"), *([(no, "!t_")] if no else [])]
    lines = [f"const bool t_ = {result};"]
    if combine:
        symbol = {"and": "&&", "or": "||", "xor": "!="}[combine]
        lines.append(f"const bool c_ = {x.read(3, 'pred')};")
        both = [(name, f"({value} {symbol} c_)") for name, value in both]
    return "{ " + " ".join([*lines, *(x.assign(name, value, "pred") for name, value in both)]) + " }"


def set_value(x: Operands) -> str:
    """set: all ones, or 1.0, where a comparison holds."""
    if len(x.parts) != 4 or x.parts[2] not in ("u32", "s32", "f32"):
        raise x.unknown()
    result = comparison(x, x.parts[1], 1)
    return x.write(0, f"{result} ? 1.f : 0.f" if x.parts[2] == "f32" else f"{result} ? ~0u : 0u", x.parts[2])


def select(x: Operands) -> str:
    """selp: bits, whatever their type."""
    ty = "b" + x.type[1:]
    return x.write(0, f"{x.read(3, 'pred')} ? {x.read(1, ty)} : {x.read(2, ty)}", ty)


def carry(x: Operands) -> str:
    """add.cc, addc, sub.cc and subc: the carry is one bit beside the registers."""
    ty = "u" + x.type[1:]
    sign, uses = {"add": "+", "sub": "-"}[x.parts[0][:3]], x.parts[0].endswith("c")
    total = f"(unsigned __int128){x.read(1, ty)} {sign} {x.read(2, ty)}{f' {sign} carry_' if uses else ''}"
    bits = int(ty[1:])
    keep = f"carry_ = s_ >> {bits} & 1; " if "cc" in x.parts else ""
    return f"{{ const unsigned __int128 s_ = {total}; {keep}{x.write(0, f'({ctype(ty)})s_', ty)} }}"


def add_or_carry(x: Operands) -> str:
    """add and sub with or without .cc."""
    return carry(x) if "cc" in x.parts else uniform(x)


INSTRUCTIONS: dict[str, Emitter] = {
    **dict.fromkeys(UNIFORM, uniform),
    **dict.fromkeys(("mul", "mad"), multiply),
    **dict.fromkeys(("div", "rem"), divide),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("popc", "clz", "bfind"), count_bits),
    **dict.fromkeys(("bfe", "bfi"), bit_field),
    **dict.fromkeys(("addc", "subc"), carry),
    **dict.fromkeys(("add", "sub"), add_or_carry),
    "shf": funnel_shift,
    "setp": compare,
    "set": set_value,
    "selp": select,
}
