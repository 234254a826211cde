"""Our times beside those of other libraries, out of the rows of all steps."""

from collections.abc import Sequence

from tests.cuda.gpu_check.report import FAILED, NOT_RUN, PASSED, Result, Row

SDPA_SHARE = 0.6  # of SDPA's speed that prefill must reach
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
    slow = [
        str(row["case"])
        for row in rows
        if str(row["case"]).startswith("prefill") and float(row.get("sdpa", SDPA_SHARE)) < SDPA_SHARE
    ]
    if slow and device == "cuda":
        return Result(6, "comparison", FAILED, f"below {SDPA_SHARE:.0%} of SDPA: {', '.join(slow)}", rows)
    return Result(6, "comparison", PASSED, "", rows)
