"""Loads, stores, atomics and cp.async."""

from tests.cudasim.arithmetic import Emitter
from tests.cudasim.operands import Operands, bits_type, ctype
from tests.cudasim.ptx import type_bytes

STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
# Parts of an opcode that say who should see or cache the data.
HINTS = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "weak", "gpu", "sys", "cta", "cluster"}
SPACES = ("param", "shared", "global", "local", "const")


def space_of(x: Operands) -> str:
    """The state space that an opcode names, "generic" if none."""
    named = [part.partition("::")[0] for part in x.parts[1:]]
    return next((part for part in named if part in SPACES), "generic")


def place(x: Operands, index: int, use: str, num_bytes: int) -> str:
    """The address of operand `index`, checked, as a char*. `use` is read, write or update."""
    space, address = space_of(x), x.address(index)
    if space == "shared":
        return f"sim::shared_{use}({x.where}, {address}, {num_bytes})"
    if space == "generic":
        return f"sim::generic({x.where}, {address}, {num_bytes}, sim::shared_{use})"
    return f"sim::global({x.where}, {address}, {num_bytes})"


def check_hints(x: Operands) -> None:
    """Raise for a part of a load's or a store's opcode that might mean something."""
    for part in x.parts[1:-1]:
        name = part.partition("::")[0]
        if part == "L2::cache_hint" or name not in {*SPACES, *STRONG, *HINTS, "v2", "v4", "v8", "L1", "L2"}:
            raise x.unknown()


def load(x: Operands) -> str:
    """ld, of one register or several."""
    check_hints(x)
    names, cell = x.vector(0), bits_type(x.type)
    size = type_bytes(x.type)
    is_parameter = space_of(x) == "param"
    where = f"(const char*){x.address(1)}" if is_parameter else place(x, 1, "read", size * len(names))
    is_strong = bool(STRONG & set(x.parts))
    acquires = "true" if "acquire" in x.parts else "false"
    lines = []
    for i, name in enumerate(names):
        at = f"p_ + {i * size}"
        value = f"sim::load_strong<{cell}>({at}, {acquires})" if is_strong else f"sim::load<{cell}>({at})"
        lines.append(x.assign(name, f"({ctype(x.type)}){value}" if x.type[0] == "s" else value, integer(x.type)))
    return f"{{ const char* p_ = {where}; {' '.join(lines)} }}"


def integer(ty: str) -> str:
    """The integer type that holds a type's bits, signed where the type is."""
    return ty if ty[0] == "s" else f"u{ty.lstrip('busf')}"


def store(x: Operands) -> str:
    """st, of one register or several."""
    check_hints(x)
    names, cell = x.vector(1), bits_type(x.type)
    size = type_bytes(x.type)
    is_strong = bool(STRONG & set(x.parts))
    releases = "true" if "release" in x.parts else "false"
    lines = []
    for i, name in enumerate(names):
        value = f"({cell})({x.value(name, integer(x.type))})"
        lines.append(
            f"sim::store_strong<{cell}>(p_ + {i * size}, {value}, {releases});"
            if is_strong
            else f"sim::store<{cell}>(p_ + {i * size}, {value});"
        )
    return f"{{ char* p_ = {place(x, 0, 'write', size * len(names))}; {' '.join(lines)} }}"


def next_value(x: Operands, op: str, ty: str, b: str, c: str) -> str:
    """What an atomic makes of `old`, as an expression of the type's bits."""
    kind = ctype(ty)
    old = f"ptx::{ty}(old)" if ty in ("f32", "f64") else f"({kind})old"
    expressions = {
        "add": f"ptx::add<{kind}>({old}, {b})",
        "min": f"ptx::min<{kind}>({old}, {b})",
        "max": f"ptx::max<{kind}>({old}, {b})",
        "and": f"{old} & {b}",
        "or": f"{old} | {b}",
        "xor": f"{old} ^ {b}",
        "exch": b,
        "inc": f"{old} >= {b} ? 0 : {old} + 1",
        "dec": f"{old} == 0 || {old} > {b} ? {b} : {old} - 1",
        "cas": f"{old} == {b} ? {c} : {old}",
    }
    if op not in expressions or (ty in ("f32", "f64") and op != "add"):
        raise x.unknown()
    return f"ptx::bits({expressions[op]})" if ty in ("f32", "f64") else expressions[op]


def atomic(x: Operands) -> str:
    """atom, which returns what was there, and red, which doesn't."""
    is_red = x.parts[0] == "red"
    ty, first = x.type, 0 if is_red else 1
    rest = [p for p in x.parts[1:-1] if p.partition("::")[0] not in SPACES and p not in STRONG and p not in HINTS]
    if len(rest) != 1 or ty not in ("u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64"):
        raise x.unknown()
    cell = bits_type(ty)
    operands = [x.read(i, ty) for i in range(first + 1, x.count)]
    following = next_value(x, rest[0], ty, operands[0], operands[-1])
    order = ", ".join("true" if {"acq_rel", name} & set(x.parts) else "false" for name in ("acquire", "release"))
    where = place(x, first, "update", type_bytes(ty))
    call = f"sim::atomic<{cell}>({where}, {order}, [&]({cell} old) -> {cell} {{ return ({cell})({following}); }})"
    return f"{call};" if is_red else x.write(0, call, f"u{ty[1:]}")


def copy_async(x: Operands) -> str:
    """cp.async of 4, 8 or 16 bytes, its commit_group and its waits."""
    if x.parts[2] == "commit_group":
        return f"sim::commit_copies({x.where});"
    if x.parts[2] == "wait_group":
        return f"sim::wait_copies({int(x.text(0))});"
    if x.parts[2] == "wait_all":
        return f"sim::commit_copies({x.where}); sim::wait_copies(0);"
    prefetch = [part for part in x.parts[5:] if part not in ("L2::64B", "L2::128B", "L2::256B")]
    size = x.text(2)
    is_plain = x.parts[2] in ("ca", "cg") and x.parts[3].startswith("shared") and x.parts[4] == "global"
    if not is_plain or prefetch or size not in (("16",) if x.parts[2] == "cg" else ("4", "8", "16")):
        raise x.unknown()
    source_bytes = size
    if x.count > 3:
        source_bytes = f"{x.read(3, 'pred')} ? 0 : {size}" if x.is_predicate(3) else x.read(3, "u32")
    return f"sim::copy_async({x.where}, {x.address(0)}, {x.address(1)}, {size}, {source_bytes});"


def copy(x: Operands) -> str:
    """cp.async; bulk copies are not known."""
    if x.parts[1] != "async" or x.parts[2] in ("bulk", "mbarrier"):
        raise x.unknown()
    return copy_async(x)


def fence(x: Operands) -> str:
    """membar and fence: order for ThreadSanitizer; blocks run one after another anyway."""
    if x.parts[1] in ("proxy", "mbarrier_init"):
        raise x.unknown()
    return "sim::fence();"


def nothing(x: Operands) -> str:
    """A hint."""
    return ";"


INSTRUCTIONS: dict[str, Emitter] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cp": copy,
    "membar": fence,
    "fence": fence,
    "prefetch": nothing,
    "prefetchu": nothing,
}
