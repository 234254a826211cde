"""How long attention takes: decode over batches, contexts and heads, prefill over prompts and chunks."""

from collections.abc import Iterator, Sequence
from contextlib import closing

from tests.cuda.gpu_check.attention_cases import HEADS, TimedCase, decode_case, decode_cases, prefill_cases, small_cases
from tests.cuda.gpu_check.attention_step import BLOCK_SIZE, AttentionStep
from tests.cuda.gpu_check.ceilings import NUM_BYTES, read_rate
from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.timing import time_graph

# Of KV that launches take turns in, at least, so that no cache holds what the next one reads.
ROTATED_BYTES = {"sim": 1 << 18, "cuda": 1 << 29}
READ_SHARE = 0.85  # of what a read-only kernel reads a second, for the case that is judged
PEAK_SHARE = 0.80  # of the memory's data sheet
JUDGED = decode_case(64, 2048, HEADS[0]).name
NOT_FINITE = "not timed: NaN or infinity in the output"


def decode_times(device: CheckDevice) -> Iterator[Row]:
    """Launches of a replayed graph. GB/s count keys, values and queries; shares are of the read-only kernel's."""
    rate = read_rate(device, min(NUM_BYTES[device.name], device.free_bytes() // 4))
    rows = []
    for case in decode_cases() if device.name == "cuda" else small_cases(decode_cases()):
        rows.append(time_case(device, case, rate))
        yield rows[-1]
    conclude(rows, (rate, device.peak_bytes_per_s()) if device.name == "cuda" else None)


def prefill_times(device: CheckDevice) -> Iterator[Row]:
    """Launches of a replayed graph; operations are those of the pairs that the causal mask leaves."""
    rows = []
    for case in prefill_cases() if device.name == "cuda" else small_cases(prefill_cases()):
        rows.append(time_case(device, case, None))
        yield rows[-1]
    conclude(rows)


def conclude(rows: Sequence[Row], rates: tuple[float, float] | None = None) -> None:
    """Raises StepFailedError for what is wrong, NotRunError if JUDGED was not timed, which needs `rates`.

    `rates` are bytes a second, of the read-only kernel and of the memory's data sheet; None: nothing is judged.
    """
    faults = []
    if num_bad := sum(row.get("not timed") == NOT_FINITE for row in rows):
        faults.append(f"{num_bad} outputs are not finite")
    if not any("us" in row for row in rows):
        faults.append(f"none of {len(rows)} cases was timed: {rows[-1]['not timed']}")
    judged = next((row for row in rows if row["case"] == JUDGED), {}) if rates else {}
    if rates and "us" in judged and (slow := judge(float(judged["GB/s"]) * 1e9, *rates)):
        faults.append(slow)
    if faults:
        raise StepFailedError("; ".join(faults))
    if rates and "us" not in judged:
        raise NotRunError(f"{JUDGED}, which is judged, was not timed: {judged.get('not timed', 'it is no case')}")


def judge(speed: float, rate: float, peak: float) -> str:
    """Why the judged case is too slow, in bytes a second; "" if it is not."""
    shares = ((speed / rate, READ_SHARE, "what a kernel reads"), (speed / peak, PEAK_SHARE, "the memory's data sheet"))
    slow = [f"{share:.1%} of {what}, not {least:.0%}" for share, least, what in shares if share < least]
    return f"{JUDGED} reaches {' and '.join(slow)}" if slow else ""


def num_pools(kv_bytes: int, least_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Pools of KV that take turns: more than four times the L2 cache, and no more than fit; 0: not even one fits."""
    wanted = max(4 * l2_bytes + 1, least_bytes)
    return min(-(-wanted // kv_bytes), int(0.8 * free_bytes) // kv_bytes)


def time_case(device: CheckDevice, case: TimedCase, rate: float | None) -> Row:
    """A row, with what is known: "us" is missing when it was not timed."""
    pool_bytes = case.num_blocks(BLOCK_SIZE) * BLOCK_SIZE * case.token_bytes
    pools = num_pools(pool_bytes, ROTATED_BYTES[device.name], device.l2_bytes, device.free_bytes())
    if not pools:
        return {"case": case.name, "not timed": "not enough memory"}
    try:
        opened = AttentionStep(device, case, pools)
    except MemoryError as error:  # there is some for the keys and values, but not for the rest
        return {"case": case.name, "not timed": str(error)}
    with closing(opened) as step:
        step(0)
        if not step.is_output_finite():
            return {"case": case.name, "not timed": NOT_FINITE}
        timing = time_graph(device, step, pools)
    row: Row = {"case": case.name, **timing.cells(), "GB/s": round(case.num_bytes / timing.best / 1e9, 1)}
    if rate is not None:
        row["of read only"] = f"{case.num_bytes / timing.best / rate:.3f}"
    row["TFLOP/s"] = round(case.num_operations / timing.best / 1e12, 2)
    return row | {"pools": pools}
