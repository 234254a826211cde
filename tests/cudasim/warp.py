"""Barriers, and operations in which the lanes of a warp take part together."""

from tests.cudasim.arithmetic import Emitter
from tests.cudasim.operands import Operands

SHUFFLES = {"up": "up", "down": "down", "bfly": "butterfly", "idx": "index"}
FOLDS = {"add": "add", "min": "min", "max": "max", "and": "and_", "or": "or_", "xor": "xor_"}


def barrier(x: Operands) -> str:
    """bar and barrier, with and without a count of threads, and their reductions."""
    parts = [part for part in x.parts[1:] if part not in ("cta", "aligned")]
    if parts == ["warp", "sync"]:
        return f"sim::sync_warp({x.where}, {x.read(0, 'u32')});"
    if parts == ["sync"]:
        threads = x.read(1, "u32") if x.count > 1 else "0"
        return f"sim::barrier({x.where}, {x.read(0, 'u32')}, {threads});"
    if parts[0] == "red" and x.count in (3, 4):
        how = {"and": "all", "or": "any", "popc": "count"}[parts[1]]
        threads = x.read(2, "u32") if x.count == 4 else "0"
        value = x.read(x.count - 1, "pred")
        call = f"sim::barrier_reduce({x.where}, {x.read(1, 'u32')}, {threads}, sim::Reduce::{how}, {value})"
        return x.write(0, call, "u32" if how == "count" else "pred")
    raise x.unknown()


def shuffle(x: Operands) -> str:
    """shfl.sync, with or without the predicate that says whether the source lane is in range."""
    if x.parts[1] != "sync" or x.parts[2] not in SHUFFLES:
        raise x.unknown()
    value, _, in_range = x.text(0).partition("|")
    mode = f"sim::Shuffle::{SHUFFLES[x.parts[2]]}"
    arguments = ", ".join(x.read(i, "u32") for i in (4, 1, 2, 3))
    lines = [
        f"const sim::Shuffled s_ = sim::shuffle({x.where}, {mode}, {arguments});",
        x.assign(value, "s_.value", "u32"),
    ]
    if in_range:
        lines.append(x.assign(in_range, "s_.in_range", "pred"))
    return "{ " + " ".join(lines) + " }"


def vote(x: Operands) -> str:
    """vote.sync."""
    functions = {"ballot": "ballot", "all": "vote_all", "any": "vote_any", "uni": "vote_uniform"}
    if x.parts[1] != "sync" or x.parts[2] not in functions:
        raise x.unknown()
    call = f"sim::{functions[x.parts[2]]}({x.where}, {x.read(2, 'u32')}, {x.read(1, 'pred')})"
    return x.write(0, call, "u32" if x.parts[2] == "ballot" else "pred")


def match(x: Operands) -> str:
    """match.any.sync and match.all.sync."""
    call = f"({x.where}, {x.read(2, 'u32')}, {x.read(1, x.type)})"
    if x.parts[1] == "any":
        return x.write(0, f"sim::match_any{call}", "u32")
    value, _, is_all = x.text(0).partition("|")
    lines = [f"const sim::Shuffled s_ = sim::match_all{call};", x.assign(value, "s_.value", "u32")]
    if is_all:
        lines.append(x.assign(is_all, "s_.in_range", "pred"))
    return "{ " + " ".join(lines) + " }"


def reduce(x: Operands) -> str:
    """redux.sync of integers."""
    if x.parts[1] != "sync" or x.parts[2] not in FOLDS or x.type not in ("u32", "s32", "b32"):
        raise x.unknown()
    how = FOLDS[x.parts[2]] + ("_signed" if x.type == "s32" and x.parts[2] in ("min", "max") else "")
    return x.write(0, f"sim::fold({x.where}, sim::Fold::{how}, {x.read(2, 'u32')}, {x.read(1, 'u32')})", "u32")


def load_matrices(x: Operands) -> str:
    """ldmatrix of one, two or four 8x8 matrices of 16-bit elements."""
    shape = [part for part in x.parts[1:] if part not in ("sync", "aligned", "trans")]
    if shape[0] != "m8n8" or shape[1] not in ("x1", "x2", "x4") or shape[-1] != "b16":
        raise x.unknown()
    is_generic = "false" if any(part.startswith("shared") for part in shape) else "true"
    is_transposed = "true" if "trans" in x.parts else "false"
    registers = x.vector(0)
    lines = [
        f"uint32_t m_[{len(registers)}];",
        f"sim::load_matrices({x.where}, {is_generic}, {is_transposed}, {x.address(1)}, m_);",
        *(x.assign(name, f"m_[{i}]", "u32") for i, name in enumerate(registers)),
    ]
    return "{ " + " ".join(lines) + " }"


def multiply_matrices(x: Operands) -> str:
    """mma of 16x8 with an inner dimension of 8 or 16: f16 or bf16, accumulated in f32."""
    inner = {"m16n8k8": 8, "m16n8k16": 16}.get(x.parts[3])
    if x.parts[1:3] != ("sync", "aligned") or inner is None or x.parts[4:6] != ("row", "col"):
        raise x.unknown()
    d, a, b, c = x.parts[6:10]
    if (d, c) != ("f32", "f32") or a != b or a not in ("f16", "bf16"):
        raise x.unknown()

    def values(index: int, ty: str) -> str:
        return ", ".join(x.value(name, ty) for name in x.vector(index))

    lines = [
        f"float d_[4] = {{{values(3, 'f32')}}};",
        f"const uint32_t a_[] = {{{values(1, 'u32')}}}, b_[] = {{{values(2, 'u32')}}};",
        f"sim::mma({x.where}, sim::Narrow::{a}, {inner}, d_, a_, b_);",
        *(x.assign(name, f"d_[{i}]", "f32") for i, name in enumerate(x.vector(0))),
    ]
    return "{ " + " ".join(lines) + " }"


INSTRUCTIONS: dict[str, Emitter] = {
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "vote": vote,
    "match": match,
    "redux": reduce,
    "ldmatrix": load_matrices,
    "mma": multiply_matrices,
}
