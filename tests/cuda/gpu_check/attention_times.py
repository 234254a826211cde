"""How long attention takes: decode over batches, contexts and heads, prefill over prompts and chunks."""

from collections.abc import Iterator
from contextlib import closing

from service.errors import ConfigError
from tests.cuda.gpu_check.attention_cases import HEADS, TimedCase, decode_case, decode_cases, prefill_cases, small_cases
from tests.cuda.gpu_check.attention_step import BLOCK_SIZE, AttentionStep
from tests.cuda.gpu_check.ceilings import NUM_BYTES, read_rate
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
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
    reason = ""
    num_bad = 0
    for case in decode_cases() if device.name == "cuda" else small_cases(decode_cases()):
        row = time_case(device, case, rate)
        yield row
        num_bad += row.get("not timed") == NOT_FINITE
        if case.name == JUDGED and device.name == "cuda" and "us" in row:
            reason = judge(float(row["GB/s"]) * 1e9, rate, device.peak_bytes_per_s())
    if num_bad or reason:
        raise StepFailedError(
            "; ".join(each for each in (num_bad and f"{num_bad} outputs are not finite", reason) if each)
        )


def judge(speed: float, rate: float, peak: float) -> str:
    """Why the judged case is too slow, in bytes a second; "" if it is not."""
    shares = ((speed / rate, READ_SHARE, "what a kernel reads"), (speed / peak, PEAK_SHARE, "the memory's data sheet"))
    slow = [f"{share:.1%} of {what}, not {least:.0%}" for share, least, what in shares if share < least]
    return f"{JUDGED} reaches {' and '.join(slow)}" if slow else ""


def prefill_times(device: CheckDevice) -> Iterator[Row]:
    """Launches of a replayed graph; operations are those of the pairs that the causal mask leaves."""
    num_bad = 0
    for case in prefill_cases() if device.name == "cuda" else small_cases(prefill_cases()):
        row = time_case(device, case, None)
        yield row
        num_bad += row.get("not timed") == NOT_FINITE
    if num_bad:
        raise StepFailedError(f"{num_bad} outputs are not finite")


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
        with closing(AttentionStep(device, case, pools)) as step:
            step(0)
            if not step.is_output_finite():
                return {"case": case.name, "not timed": NOT_FINITE}
            timing = time_graph(device, step, pools)
    except ConfigError as error:  # there is memory for the keys and values, but not for the rest
        return {"case": case.name, "not timed": str(error)}
    row: Row = {"case": case.name, **timing.cells(), "GB/s": round(case.num_bytes / timing.best / 1e9, 1)}
    if rate is not None:
        row["of read only"] = f"{case.num_bytes / timing.best / rate:.3f}"
    row["TFLOP/s"] = round(case.num_operations / timing.best / 1e12, 2)
    return row | {"pools": pools}
