"""cvt between all number formats, mov with its packing and unpacking, and cvta between address spaces."""

from tests.cudasim.arithmetic import ROUNDING, Emitter
from tests.cudasim.operands import FLOATS, NARROW, Operands, ctype

FLOAT8 = {"e4m3x2": "ptx::e4m3", "e5m2x2": "ptx::e5m2"}
INTEGRAL = {name + "i": mode for name, mode in ROUNDING.items()}


def convert(x: Operands) -> str:
    """cvt{.rounding}{.ftz}{.sat}.to.from."""
    target, source = x.parts[-2:]
    if target.endswith("x2") or source.endswith("x2"):
        return convert_pair(x, target, source)
    rest = set(x.parts[1:-2]) - {"sat", "satfinite", "ftz"}
    if source in FLOATS or source in NARROW:
        return convert_float(x, target, source, rest)
    value = x.read(1, source)
    if target in FLOATS:
        if not rest <= {"rn"}:
            raise x.unknown()
        return x.write(0, f"({ctype(target)})({value})", target)
    if target in NARROW:
        if not rest <= {"rn"}:
            raise x.unknown()
        return x.write(0, f"ptx::from_float<{ctype(target)}>((double)({value}))", target)
    if rest:
        raise x.unknown()
    return x.write(0, f"ptx::clamp_integer<{ctype(target)}>({value})" if "sat" in x.parts else value, target)


def convert_float(x: Operands, target: str, source: str, rest: set[str]) -> str:
    """From f32, f64, f16 or bf16."""
    value = x.read(1, source)
    if source in NARROW:
        value = f"ptx::to_float({value})"
    if "ftz" in x.parts and source == "f32":
        value = f"ptx::flush({value})"
    if target not in FLOATS and target not in NARROW:
        mode = INTEGRAL.get(next(iter(rest), "rzi"))
        if mode is None or len(rest) > 1:
            raise x.unknown()
        return x.write(0, f"ptx::to_integer<{ctype(target)}>({value}, {mode})", target)
    if rest & set(INTEGRAL):
        value = f"ptx::round_integral({value}, {INTEGRAL[rest.pop()]})"
    if not rest <= {"rn"}:
        raise x.unknown()
    if target in NARROW:
        if {"sat", "satfinite"} & set(x.parts):
            raise x.unknown()
        return x.write(0, f"ptx::from_float<{ctype(target)}>({value})", target)
    value = f"({ctype(target)})({value})"
    if "sat" in x.parts:
        value = f"ptx::saturate({value})"
    return x.write(0, f"ptx::flush({value})" if "ftz" in x.parts and target == "f32" else value, target)


def convert_pair(x: Operands, target: str, source: str) -> str:
    """Two numbers at once; of two operands the first becomes the upper half."""
    rest = set(x.parts[1:-2])
    if source in FLOAT8 and target == "f16x2" and rest == {"rn"}:
        raw, kind = x.read(1, "u16"), FLOAT8[source]
        halves = (f"ptx::from_float<ptx::half>(ptx::to_float({kind}{{(uint8_t)(({raw}) >> {s})}}))" for s in (0, 8))
        return x.write(0, f"ptx::pair<ptx::half>{{{', '.join(halves)}}}", "f16x2")
    if target in FLOAT8 and rest == {"rn", "satfinite"}:
        if source == "f32":
            low, high = x.read(2, "f32"), x.read(1, "f32")
        elif source == "f16x2":
            low, high = (f"ptx::to_float({x.read(1, source)}.{part})" for part in ("lo", "hi"))
        else:
            raise x.unknown()
        kind = FLOAT8[target]
        pack = f"ptx::from_float<{kind}>({low}).raw | ptx::from_float<{kind}>({high}).raw << 8"
        return x.write(0, pack, "u16")
    narrow = NARROW.get(target.removesuffix("x2"))
    if narrow is None or source != "f32" or rest != {"rn"} or x.count != 3:
        raise x.unknown()
    low, high = (f"ptx::from_float<{narrow}>({x.read(i, 'f32')})" for i in (2, 1))
    return x.write(0, f"ptx::pair<{narrow}>{{{low}, {high}}}", target)


def move(x: Operands) -> str:
    """mov: a copy of bits; {low, high} packs, or unpacks, a wider register."""
    target, source = x[0], x[1]
    if isinstance(source, tuple):
        return pack(x, source)
    if isinstance(target, tuple):
        return unpack(x, target, source)
    ty = x.type if x.type == "pred" else "b" + x.type.lstrip("busf")
    return x.write(0, x.read(1, ty), ty)


def pack(x: Operands, source: tuple[str, ...]) -> str:
    """mov.b64 d, {low, high}."""
    width = int(x.type[1:]) // len(source)
    fields = (f"((uint64_t){x.value(name, f'u{width}')} << {i * width})" for i, name in enumerate(source))
    return x.write(0, " | ".join(fields), "u64")


def unpack(x: Operands, target: tuple[str, ...], source: str) -> str:
    """mov.b64 {low, high}, s."""
    width = int(x.type[1:]) // len(target)
    wide = x.value(source, x.type)
    lines = (x.assign(name, f"w_ >> {i * width}", f"u{width}") for i, name in enumerate(target) if name != "_")
    return f"{{ const {ctype(x.type)} w_ = {wide}; {' '.join(lines)} }}"


def convert_address(x: Operands) -> str:
    """cvta.shared makes a generic address, cvta.to.shared undoes it; other spaces have generic addresses here."""
    ty = x.type
    offset = ""
    if any(part.startswith("shared") for part in x.parts):
        offset = " - sim::generic_shared" if "to" in x.parts else " + sim::generic_shared"
    return x.write(0, x.read(1, ty) + offset, ty)


def is_space(x: Operands) -> str:
    """isspacep.shared and isspacep.global."""
    if x.type not in ("shared", "global"):
        raise x.unknown()
    return x.write(0, f"{'' if x.type == 'shared' else '!'}sim::is_shared({x.read(1, 'u64')})", "pred")


INSTRUCTIONS: dict[str, Emitter] = {"cvt": convert, "mov": move, "cvta": convert_address, "isspacep": is_space}
