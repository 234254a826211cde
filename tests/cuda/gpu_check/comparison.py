"""Our times beside those of other libraries, out of the rows of all steps."""

from collections.abc import Mapping, Sequence

from tests.cuda.gpu_check.attention_cases import prefill_cases
from tests.cuda.gpu_check.attention_times import JUDGED as JUDGED_DECODE
from tests.cuda.gpu_check.report import FAILED, NOT_RUN, PASSED, Result, Row

SDPA_SHARE = 0.6  # of SDPA's speed that prefill must reach
FLASHINFER = ("flashinfer", "flashinfer tensor cores")  # decode must not be slower than either
JUDGED = tuple(case.name for case in prefill_cases() if not case.is_ragged)
OURS = ("decode-times", "prefill-times")


def compare(results: Sequence[Result], device: str) -> Result:
    """A row for each case that others ran too: microseconds, and how many times faster than each of them we are."""
    ours = {row["case"]: row["us"] for each in results if each.name in OURS for row in each.rows if "us" in row}
    others: dict[object, Row] = {}
    for each in results:
        for row in each.rows:
            if "peer" in row and "us" in row and row["case"] in ours:
                others.setdefault(row["case"], {})[str(row["peer"])] = row["us"]
    rows = [
        {
            "case": case,
            "us": ours[case],
            **{peer: round(float(us) / float(ours[case]), 3) for peer, us in peers.items()},
        }
        for case, peers in others.items()
    ]
    if not rows:
        return Result(6, "comparison", NOT_RUN, "no case was timed by us and by another", [])
    status, reason = judge(rows, ours) if device == "cuda" else (PASSED, "")
    return Result(6, "comparison", status, reason, rows)


def judge(rows: Sequence[Row], ours: Mapping[object, object]) -> tuple[str, str]:
    """Status and reason, by JUDGED and JUDGED_DECODE; cases that lack one of the two times are not judged."""
    shares = {row["case"]: float(row["sdpa"]) for row in rows if "sdpa" in row}
    faults = []
    if slow := [name for name in JUDGED if shares.get(name, SDPA_SHARE) < SDPA_SHARE]:
        faults.append(f"below {SDPA_SHARE:.0%} of SDPA: {', '.join(slow)}")
    decode = next((row for row in rows if row["case"] == JUDGED_DECODE), {})
    ratios = {peer: float(decode[peer]) for peer in FLASHINFER if peer in decode}
    if ratios and min(ratios.values()) < 1:
        peer = min(ratios, key=lambda each: ratios[each])
        faults.append(f"{JUDGED_DECODE} takes {1 / ratios[peer]:.2f} times as long as in {peer}")
    if faults:
        return FAILED, "; ".join(faults)
    missing = {
        "prefill-times has not timed": [name for name in JUDGED if name not in ours],
        "SDPA was not timed for": [name for name in JUDGED if name in ours and name not in shares],
        "decode-times has not timed": [JUDGED_DECODE] if JUDGED_DECODE not in ours else [],
        "FlashInfer was not timed for": [JUDGED_DECODE] if JUDGED_DECODE in ours and not ratios else [],
    }
    reasons = [f"{what} {', '.join(names)}" for what, names in missing.items() if names]
    return (NOT_RUN, "; ".join(reasons)) if reasons else (PASSED, "")
