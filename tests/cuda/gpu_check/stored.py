"""Inputs and outputs of the simulator, stored under tests/cuda/stored/, and a device's answers beside them.

python -m tests.cuda.gpu_check.stored     makes them again on the simulator, when kernels or their arguments change

A case is a sequence of launches over named arrays. Its file holds the arrays before the launches, and after them those
that a kernel has written.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np

from graphs.op_twins_attention import AttentionSpec
from service.executor.cuda.compiler import compile_cubin
from service.executor.cuda.kernels import SAMPLE_KERNELS, KernelConfig, Scalar
from tests.cuda.attention_problem import E4M3, Problem, decode_plan, make_arrays, prefill_plan
from tests.cuda.gpu_check.ceilings import READ_ONLY, read_rate
from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError, need_gpu, open_device
from tests.cuda.gpu_check.report import Row
from tests.cuda.sampling_rows import Rows, sample_grid, sample_workspace
from tests.cuda.sim_kernels import Out, SimKernels
from tests.cuda.test_rope_kernel import POSITIONS, SLOTS, RopeCase

FOLDER = Path(__file__).resolve().parents[1] / "stored"
CUBIN_ARCHITECTURE = "sm_90"
CUBIN = FOLDER / f"read_only-{CUBIN_ARCHITECTURE}.cubin"
MAX_ULPS = 2.0
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "e4m3": E4M3}  # which .npz does not know


@dataclass(frozen=True)
class Case:
    """`launches`: kernel, grid, arguments; an argument that is a string names an array, "+name" one that is written.

    "~name" is written too, but what one kernel leaves there is for the next one alone.
    """

    config: KernelConfig
    arrays: dict[str, np.ndarray]
    launches: list[tuple[str, tuple[int, int], list[object]]] = field(default_factory=list)

    @property
    def written(self) -> list[str]:
        return self._marked("+")

    def run(self, device: CheckDevice, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the kernels make of `arrays`, which stay as they are."""
        kernels = SimKernels(self.config, device)
        outs = {name: Out(arrays[name].copy()) for name in self._marked("+~")}
        for kernel, grid, arguments in self.launches:
            kernels.launch(kernel, grid, *(self._value(each, arrays, outs) for each in arguments))
        return {name: outs[name].array for name in self.written}

    def _marked(self, marks: str) -> list[str]:
        names = {name for _, _, arguments in self.launches for name in arguments if isinstance(name, str)}
        return sorted(name[1:] for name in names if name[0] in marks)

    @staticmethod
    def _value(argument: object, arrays: dict[str, np.ndarray], outs: dict[str, Out]) -> object:
        if not isinstance(argument, str):
            return argument
        name = argument.lstrip("+~")
        return outs.get(name, arrays.get(name))


def attention_case(problem: Problem, shape: str, chunk: int = 0) -> Case:
    arrays = make_arrays(problem)
    plan = decode_plan(problem, 3, chunk) if shape == "decode" else prefill_plan(problem, 64, chunk)
    config = KernelConfig(
        Scalar(problem.scalar), problem.head_dim, problem.block_size, 64, Scalar(problem.scalar), problem.is_fp8
    )
    parts = (max(1, plan.num_slots), problem.num_kv_heads, 16)
    named = {"q": arrays.q, "kv": arrays.kv, "table": arrays.table, "items": plan.items, "indptr": plan.indptr}
    named |= {"merges": plan.merges, "num_merges": np.array([len(plan.merges)], np.int32)}
    named |= {"out": np.full_like(arrays.q, np.nan)}
    named |= {
        "part": np.full((*parts, problem.head_dim), np.nan, np.float32),
        "lse": np.full(parts, np.nan, np.float32),
    }
    sizes = [arrays.table.shape[1], problem.num_kv_heads, problem.group_size, problem.window]
    sizes += [problem.scale, problem.softcap * math.log2(math.e), problem.v_scale]
    kernel_parts = ["+part", "+lse"] if plan.num_slots else [None, None]
    grid = (3, problem.num_kv_heads) if shape == "decode" else (problem.num_kv_heads, len(plan.items))
    memory = ["q", "kv", "table", "items", "indptr", "+out", *kernel_parts]
    launches = [(f"attn_{shape}", grid, [*memory, *sizes])]
    if plan.num_slots:
        merged = ["part", "lse", "merges", "num_merges", "+out", problem.num_kv_heads, problem.group_size]
        launches.append(("attn_combine", (len(plan.merges), problem.num_kv_heads), merged))
    return Case(config, named, launches)


def rope_case() -> Case:
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=64)
    made = RopeCase(spec, "bf16", has_norms=True, device=object())
    tables = made.tables
    named = {"qkv": made.qkv, "positions": POSITIONS, "slots": SLOTS, "cos": tables.cos, "sin": tables.sin}
    named |= {"q_norm": tables.q_norm, "k_norm": tables.k_norm, "q": made.q, "kv": made.kv}
    arguments = ["qkv", "positions", "slots", "cos", "sin", "q_norm", "k_norm", "+q", "+kv", 3, 1]
    launch = ("rope_kv_write", (len(SLOTS), 2), [*arguments, tables.cos.shape[1], spec.norm_epsilon, 1.0, 1.0])
    return Case(KernelConfig(Scalar.BF16, 64, 16, 64, Scalar.BF16), named, [launch])


def sampling_case() -> Case:
    logits = (3 * np.random.default_rng(8).standard_normal((4, 1031))).astype(np.float16)
    rows = Rows.of(
        logits, temperature=[0.0, 0.8, 1.5, 1.0], top_k=[0, 40, 0, 7], top_p=[1, 0.9, 0.7, 1], seed=[1, 2, 3, 4]
    )
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    named = {"logits": logits, **dict(zip(names, rows.columns, strict=True)), "token": np.full(4, -7, np.int32)}
    named |= {"workspace": sample_workspace(*logits.shape, 0)}
    arguments = ["logits", *names, *[None] * 9, "+token", None, None, None, "~workspace", logits.shape[1], 0]
    config = KernelConfig(Scalar.HALF, 64, 16, 64, Scalar.HALF)
    return Case(config, named, [(name, sample_grid(name, *logits.shape), arguments) for name in SAMPLE_KERNELS])


CASES: dict[str, Callable[[], Case]] = {
    "decode-bf16": lambda: attention_case(Problem((17, 1, 64, 100), (1,) * 4, 4, head_dim=64), "decode", 64),
    "decode-half": lambda: attention_case(Problem((5, 90), (1, 3), 3, 1, head_dim=128, scalar="half"), "decode"),
    "decode-e4m3": lambda: attention_case(
        Problem((30, 70), (1, 1), 4, 1, head_dim=64, is_fp8=True, k_scale=0.5, v_scale=2.0), "decode"
    ),
    "prefill-cut-bf16": lambda: attention_case(Problem((5, 75), (3, 12), 3, 1, head_dim=64), "prefill", 32),
    "prefill-bf16": lambda: attention_case(Problem((5, 1, 70), (3, 1, 30), 3, 1, head_dim=64), "prefill"),
    "rope-bf16": rope_case,
    "sampling-half": sampling_case,
}


def replay(device: CheckDevice) -> Iterator[Row]:
    """A row for each case: the largest distance from what is stored."""
    num_far = 0
    for name, make in CASES.items():
        before, after = read(FOLDER / f"{name}.npz")
        found = make().run(device, before)
        distances = {each: distance_in_ulps(found[each], after[each]) for each in after}
        is_near = all(each <= MAX_ULPS for each in distances.values())
        num_far += not is_near
        said = ", ".join(f"{each} {distance:.3g}" for each, distance in distances.items())
        yield {"case": name, "distance in ulps": said, "near": is_near}
    if num_far:
        raise StepFailedError(
            f"{num_far} of {len(CASES)} cases are further than {MAX_ULPS:g} bf16 ulps from what is stored"
        )


def distance_in_ulps(found: np.ndarray, stored: np.ndarray) -> float:
    """The largest, in units of bfloat16's last place; of whole numbers, infinite unless they are equal.

    A unit is that of the larger of the stored number and the root mean square of its row, the last axis: sums that
    cancel are as exact as their row, not as themselves. NaN where the stored array has NaN is no distance.
    """
    if stored.dtype.kind in "iu":
        return 0.0 if np.array_equal(found, stored) else math.inf
    ours, theirs = found.astype(np.float64), stored.astype(np.float64)
    if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
        return math.inf
    ours, theirs = np.nan_to_num(ours), np.nan_to_num(theirs)
    size = np.maximum(np.abs(theirs), np.sqrt((theirs**2).mean(-1, keepdims=True)))
    unit = 2.0 ** (np.floor(np.log2(np.maximum(size, np.finfo(np.float32).tiny))) - 7)
    return float((np.abs(ours - theirs) / unit).max())


def write(path: Path, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    entries = {}
    for when, arrays in (("before", before), ("after", after)):
        for name, array in arrays.items():
            kind = next((kind for kind, dtype in DTYPES.items() if array.dtype == dtype), "")
            plain = array.view(np.uint8 if kind == "e4m3" else np.uint16) if kind else array
            entries[f"{when} {name} {kind}"] = plain
    np.savez_compressed(path, **entries)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arrays before and after the launches."""
    found: dict[str, dict[str, np.ndarray]] = {"before": {}, "after": {}}
    with np.load(path) as file:
        for entry in file.files:
            when, name, kind = entry.split(" ")
            found[when][name] = file[entry].view(DTYPES[kind]) if kind else file[entry]
    return found["before"], found["after"]


def newer_cubin(device: CheckDevice) -> Iterator[Row]:
    """Whether this driver runs a cubin that another machine's NVRTC has made, the newest when it was stored."""
    gpu = need_gpu(device, "the simulator runs no cubins")
    architecture = gpu.modules.architecture
    if architecture != CUBIN_ARCHITECTURE:
        raise NotRunError(f"the stored cubin is for {CUBIN_ARCHITECTURE}, this is {architecture}")
    module = gpu.modules.load(CUBIN.read_bytes())
    kernel = gpu.modules.function(module, "read_only")
    rate = read_rate(device, 1 << 26, kernel)
    yield {"cubin": CUBIN.name, "driver": gpu.describe()["driver"], "GB/s": round(rate / 1e9, 1)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, open_device("sim", Path(folder)) as device:
        for name, make in CASES.items():
            case = make()
            write(FOLDER / f"{name}.npz", case.arrays, case.run(device, case.arrays))
    with chdir("/"):  # the compiler notes where it ran
        CUBIN.write_bytes(compile_cubin(READ_ONLY, CUBIN_ARCHITECTURE).cubin)


if __name__ == "__main__":
    main()
