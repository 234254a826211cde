"""Bugs seeded one at a time into the kernels of cuda/, and who must find each.

python -m tests.cuda.seeded_bugs [name part ...]     prints what every run reports; minutes
"""

import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from service.executor.cuda.kernels import source_folder
from tests.cudasim.sanitized import Outcome, run_case

# Threads in order; shuffled; and the two sanitizers.
RUNS = {"plain": ("plain", 0), "shuffled": ("plain", 2), "asan": ("asan", 0), "tsan": ("tsan", 2)}
WRONG = "AssertionError"


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in a file, wherever it stands, `count` times; `finder` of RUNS reports `fault` in `case`."""

    name: str
    file: str
    old: str
    new: str
    case: str
    finder: str
    fault: str
    count: int = 1

    def seed(self, folder: Path) -> None:
        """Copy the kernels to a folder, with the bug."""
        shutil.copytree(source_folder(), folder, dirs_exist_ok=True)
        path = folder / self.file
        text = path.read_text()
        if text.count(self.old) != self.count:
            raise ValueError(f"{self.name}: {self.file} holds the text {text.count(self.old)} times, not {self.count}")
        path.write_text(text.replace(self.old, self.new))

    def outcome(self, run: str, folder: Path) -> Outcome:
        """What one of RUNS says of the kernels in a folder."""
        flavour, seed = RUNS[run]
        return run_case(flavour, seed, "tests.cuda.kernel_cases:run", self.case, sources=folder)


NOT_WAITED = "before the wait that covers its cp.async|reads shared memory that nobody wrote"

BUGS = [
    # ---- barriers and copies of attention
    Bug("no barrier after the wait for keys", "attention.cu",
        "wait_for_copies<1>();\n    __syncthreads();", "wait_for_copies<1>();",
        "decode", "shuffled", NOT_WAITED),
    Bug("no barrier after the wait for values", "attention.cu",
        "wait_for_copies<2>();\n    __syncthreads();", "wait_for_copies<2>();",
        "decode", "shuffled", NOT_WAITED),
    Bug("a tile copied over one that is still read", "attention.cu",
        "__syncthreads();  // keys are there; the tile before is done with\n",
        "if constexpr (S::kIsDecode) copy_tile(end, stage ^ 1);\n    __syncthreads();\n",
        "decode", "tsan", r"data race at attention\.cu"),
    Bug("no barrier between items", "attention.cu",
        "__syncthreads();  // the next item's", "// the next item's",
        "decode", "tsan", r"data race at attention\.cu"),
    Bug("no barrier before the merge takes the tiles' place", "attention.cu",
        "__syncthreads();  // the last tile", "// the last tile",
        "decode", "tsan", r"data race at attention\.cu"),
    Bug("keys are not waited for", "attention.cu",
        "wait_for_copies<1>();", "wait_for_copies<2>();",
        "decode", "plain", NOT_WAITED),
    Bug("values are not waited for", "attention.cu",
        "wait_for_copies<2>();", "wait_for_copies<3>();",
        "decode", "plain", NOT_WAITED),
    Bug("copies never committed", "attention.cu",
        "stage * S::kStageBytes);\n      commit_copies();\n", "stage * S::kStageBytes);\n",
        "decode", "plain", f"{NOT_WAITED}|never committed"),
    Bug("copies in flight at the end", "attention.cu",
        "  wait_for_copies<0>();  // the queries", "  // the queries",
        "decode", "shuffled", "in flight"),
    Bug("a thread skips the barriers of the merge", "attention.cu",
        "if constexpr (S::kIsDecode) {", "if constexpr (S::kIsDecode) {\n    if (threadIdx.x == 5) return;",
        "decode", "plain", "threads meet in different barriers"),
    Bug("halves of a block at different barriers", "attention.cu",
        "    wait_for_copies<2>();\n",
        "    if (threadIdx.x < 64) __syncthreads();\n    else\n      __syncthreads();\n    wait_for_copies<2>();\n",
        "prefill", "plain", "threads meet in different barriers"),
    Bug("no guard for blocks beyond the items", "attention.cu",
        "if (i < item_indptr[0]) attend<Prefill>", "attend<Prefill>",
        "prefill", "asan", r"heap-buffer-overflow at attention\.cu"),
    Bug("no barrier before the warps' parts are read", "attention_output.cuh",
        "    }\n  }\n  __syncthreads();\n  const int num_rows", "    }\n  }\n  const int num_rows",
        "decode", "plain", "nobody wrote"),
    Bug("a maximum that nobody writes", "attention_output.cuh",
        "if ((lane & 3) == 0) {", "if ((lane & 3) == 0 && (row & 15)) {",
        "decode", "plain", "nobody wrote"),
    Bug("output rows not guarded", "attention_output.cuh",
        "    if (row >= num_rows) continue;\n", "",
        "prefill", "tsan", r"data race at attention\.cu"),
    Bug("block table read beyond a row", "kv_tile.cuh",
        " && token < num_tokens;", ";",
        "decode", "asan", r"heap-buffer-overflow at attention\.cu"),
    Bug("block ids from the wrong lane", "kv_tile.cuh",
        "tile_blocks, lane)", "tile_blocks, lane ^ 1)",
        "decode", "plain", WRONG),
    Bug("rows of a tile not padded where written", "kv_tile.cuh",
        "stage + token * kPaddedBytes", "stage + token * kRowBytes",
        "prefill", "plain", f"{NOT_WAITED}|in flight writes too"),
    Bug("a tile's row begins four bytes late", "kv_tile.cuh",
        "copy_async(stage + token", "copy_async(stage + 4 + token",
        "prefill", "plain", "misaligned access of 16 bytes"),
    # ---- arithmetic of attention
    Bug("total not scaled down with the maximum", "attention_softmax.cuh",
        "total[r][half_row] *= factor", "(void)factor",
        "decode", "plain", WRONG),
    Bug("causal mask off by one", "attention_softmax.cuh",
        "min(item.kv_end, position + 1)", "min(item.kv_end, position)",
        "prefill", "plain", WRONG),
    Bug("totals summed over the wrong lanes", "attention_softmax.cuh",
        "__shfl_xor_sync(kWholeWarp, sum, 2)", "__shfl_xor_sync(kWholeWarp, sum, 4)",
        "decode", "plain", WRONG),
    Bug("a shuffle that half of the lanes skip", "attention_softmax.cuh",
        "      tops = fmaxf(tops, __shfl_xor_sync(kWholeWarp, tops, 1));",
        "      if (lane_of_thread() & 1) tops = fmaxf(tops, __shfl_xor_sync(kWholeWarp, tops, 1));",
        "decode", "plain", "deadlock|lanes meet in different warp operations"),
    Bug("a partial result without its weight", "attention_combine.cu",
        "sum.x += weight * part.x;", "sum.x += part.x;",
        "decode", "plain", WRONG),
    Bug("sums added before all are there", "attention_combine.cu",
        "sums[threadIdx.x] = sum;\n    __syncthreads();", "sums[threadIdx.x] = sum;",
        "decode", "plain", "nobody wrote"),
    Bug("a part of a prefill item in the slot before its own", "attention_output.cuh",
        "slot + row / 16", "slot + row / 32",
        "prefill_cut", "tsan", r"data race at attention\.cu"),
    # ---- inline PTX
    Bug("PTX: mma with b0 and b1 swapped", "tensor_core.cuh",
        '"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)',
        "prefill", "plain", WRONG, count=2),
    Bug("PTX: mma of f16 in the wrapper for bf16", "tensor_core.cuh",
        "f32.bf16.bf16.f32", "f32.f16.f16.f32",
        "prefill", "plain", WRONG),
    Bug("PTX: ldmatrix without .trans", "tensor_core.cuh",
        ".x4.trans.", ".x4.",
        "prefill", "plain", WRONG),
    Bug("PTX: cp.async without its source size", "tensor_core.cuh",
        "[%0], [%1], 16, %2;", "[%0], [%1], 16;",
        "decode", "plain", WRONG),
    Bug("PTX: a pointer not converted to a shared address", "scalar.cuh",
        "static_cast<u32>(__cvta_generic_to_shared(p))", "static_cast<u32>(reinterpret_cast<u64>(p))",
        "decode", "plain", "was a pointer not converted to a shared address"),
    Bug("PTX: halves of a pair swapped", "scalar.cuh",
        '"f"(second), "f"(first)', '"f"(first), "f"(second)',
        "prefill", "plain", WRONG, count=2),
    Bug("PTX: redux names half of the lanes", "gumbel_race.cuh",
        "redux.sync.max.u32 %0, %1, 0xffffffff;", "redux.sync.max.u32 %0, %1, 0x0000ffff;",
        "sampling", "plain", "outside its own mask 0x0000ffff"),
    Bug("wrong bytes of e4m3 widened", "kv_tile.cuh",
        "widen<0x1404>", "widen<0x4140>",
        "decode_fp8", "plain", WRONG, count=2),
    # ---- rotation and KV write
    Bug("a head rotated before other lanes have loaded it", "rope_kv_write.cu",
        "  __syncwarp();\n}\n\nDEVICE void rotate_head", "}\n\nDEVICE void rotate_head",
        "rope", "tsan", r"data race at rope_kv_write\.cu"),
    Bug("heads beyond the last not guarded", "rope_kv_write.cu",
        "if (index >= num_all) return;", "",
        "rope", "asan", "heap-buffer-overflow"),
    Bug("a padding token written", "rope_kv_write.cu",
        "slot < 0 ? nullptr :", "",
        "rope", "asan", "heap-buffer-overflow|SEGV"),
    Bug("values in the keys' place", "rope_kv_write.cu",
        "slot.key + slot.value_bytes, pair", "slot.key, pair",
        "rope", "tsan", "data race"),
    # ---- sampling
    Bug("bins added to before they are cleared", "sample_select.cuh",
        "memory->bins.clear();\n    __syncthreads();", "memory->bins.clear();",
        "sampling_unsure", "tsan", r"data race at sample_rows\.cu"),
    Bug("bins added to without atomics", "sample_select.cuh",
        "atomicAdd(&low[bin], mass_low);", "low[bin];\n    low[bin] = before + mass_low;",
        "sampling", "tsan", r"data race at sample_rows\.cu"),
    Bug("a reduction's memory used again at once", "logits_part.cuh",
        "value, distance));\n  __syncthreads();\n  return value;", "value, distance));\n  return value;",
        "sampling", "tsan", "data race"),
    Bug("a part masked while it is edited", "sample_edits.cuh",
        "  __syncthreads();  // a masked token", "  // a masked token",
        "sampling", "tsan", r"data race at sample_rows\.cu"),
    Bug("every block edits all of the row", "sample_edits.cuh",
        "if (token < part.begin || token >= part.end) continue;", "",
        "sampling", "tsan", r"data race at sample_rows\.cu"),
    Bug("a thread leaves before a barrier", "sample_edits.cuh",
        "  __syncthreads();  // a masked token",
        "  if (threadIdx.x == 5) return;\n  __syncthreads();  // a masked token",
        "sampling", "plain", "deadlock|leaves the kernel|left the kernel|different barriers"),
    Bug("a loop with a bound for each thread around a warp's operation", "logits_part.cuh",
        "start < end; start += kSliceLogits", "start + 8 * static_cast<int>(threadIdx.x) < end; start += kSliceLogits",
        "sampling", "plain", "deadlock|lanes meet|left the kernel|different barriers"),
    Bug("16 bytes loaded from wherever a row begins", "logits_part.cuh",
        "reinterpret_cast<u64>(logits) % 16 == 0 && ", "",
        "sampling_half", "plain", "misaligned access of 16 bytes"),
    Bug("16 bytes loaded beyond a row", "logits_part.cuh",
        "% 16 == 0 && first + kOctet <= vocab_size", "% 16 == 0",
        "sampling_half", "asan", r"heap-buffer-overflow at sample_rows\.cu"),
    Bug("a histogram not cleared", "sample_rows.cu",
        "workspace.masses[bin] = workspace.counts[bin] = 0;", "workspace.masses[bin] = 0;",
        "sampling_unsure", "plain", WRONG),
    Bug("blocks add to a row's histogram without atomics", "sample_filter.cuh",
        "atomicAdd(&row.counts[bin], bins->counts[bin]);", "row.counts[bin] += bins->counts[bin];",
        "sampling", "tsan", r"data race at sample_rows\.cu"),
    Bug("tokens listed in one place", "sample_filter.cuh",
        "tokens[atomicAdd(num_listed, 1u)]", "tokens[(*num_listed)++]",
        "sampling_unsure", "tsan", r"data race at sample_rows\.cu"),
    Bug("more tokens listed than there is room for", "sample_rows.cu",
        "if (cuts.num_tokens <= kListTokens)", "if (cuts.num_tokens <= 2 * kListTokens)",
        "sampling_unsure", "plain", "shared memory"),
]  # fmt: skip


def main(*parts: str) -> None:
    """A line for each bug and run."""
    for bug in BUGS:
        if parts and not any(part in bug.name for part in parts):
            continue
        with tempfile.TemporaryDirectory() as folder:
            bug.seed(Path(folder))
            print(f"{bug.name} ({bug.finder})")
            for run in RUNS:
                fault = bug.outcome(run, Path(folder)).fault
                mark = "=" if run == bug.finder and re.search(bug.fault, fault) else "!" if run == bug.finder else " "
                print(f" {mark} {run:9}{fault or 'nothing'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
