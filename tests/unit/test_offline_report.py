"""What passes of `chairlift bench offline` come to."""

from dataclasses import asdict, replace

import pytest

from service.bench.offline_report import OfflineRun, json_comparison, json_report, ratio_line

PASS = OfflineRun(
    requests=3,
    errors=0,
    prompt_tokens=60,
    cached_prompt_tokens=0,
    output_tokens=12,
    elapsed_s=1.0,
    requests_per_s=3.0,
    output_tokens_per_s=12.0,
    total_tokens_per_s=72.0,
)
RATES = [30.0, 12.0, 15.0, 18.0, 24.0, 21.0]


def passes(rates: list[float]) -> list[OfflineRun]:
    return [replace(PASS, output_tokens_per_s=rate) for rate in rates]


@pytest.mark.parametrize(
    ("num_pairs", "expected"),
    [
        (1, "30.0, and 6.0 with spin=off; ratio 5.000 in the median of 1 pair"),
        (5, "18.0, and 6.0 with spin=off; ratio 3.000 in the median of 5 pairs"),
        (6, "19.5, and 6.0 with spin=off; ratio 3.250 in the median of 6 pairs, 95 % interval 2.000 to 5.000"),
    ],
)
def test_ratio_of_two_engines_has_an_interval_from_six_pairs_on(num_pairs: int, expected: str) -> None:
    line = ratio_line(passes(RATES[:num_pairs]), passes([6.0] * num_pairs), {"spin": "off"})
    assert f"output tokens/s in the median: {expected}\n" == line


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(PASS, errors=1), "a pass had bad requests"),
        (replace(PASS, output_tokens=11), "passes of a pair differ in output tokens, 12 and 11"),
    ],
)
def test_passes_of_other_work_have_no_ratio(other: OfflineRun, reason: str) -> None:
    settings = {"spin": "off", "kv_dtype": "int8"}
    expected = f"output tokens/s in the median: 12.0, and 12.0 with spin=off kv_dtype=int8; no ratio, for {reason}\n"
    assert expected == ratio_line([PASS, PASS], [PASS, other], settings)
    expected_report = {
        "median_output_tokens_per_s": 12.0,
        "runs": [asdict(PASS), asdict(PASS)],
        "against": {
            "settings": settings,
            "median_output_tokens_per_s": 12.0,
            "runs": [asdict(PASS), asdict(other)],
        },
        "output_tokens_per_s_ratio": None,
        "why_no_ratio": reason,
    }
    assert expected_report == json_comparison([PASS, PASS], [PASS, other], settings)


def test_errors_of_the_first_engine_leave_no_ratio_either() -> None:
    assert "no ratio, for a pass had bad requests\n" in ratio_line([replace(PASS, errors=1)], [PASS], {"spin": "off"})


def test_passes_without_output_have_no_ratio() -> None:
    idle = replace(PASS, output_tokens=0, output_tokens_per_s=0.0)
    assert "no ratio, for a pass had no output\n" in ratio_line([idle], [idle], {"spin": "off"})


def test_ratio_in_json_has_its_pairs_and_its_interval() -> None:
    report = json_comparison(passes(RATES), passes([6.0] * 6), {"spin": "off"})
    assert {"num_pairs": 6, "median": 3.25, "low": 2.0, "high": 5.0} == report["output_tokens_per_s_ratio"]
    assert report["why_no_ratio"] is None
    assert 19.5 == report["median_output_tokens_per_s"]


def test_one_engine_has_its_passes_and_their_median() -> None:
    assert {"median_output_tokens_per_s": 12.0, "runs": [asdict(PASS)]} == json_report([PASS])
