"""Arrival processes, lengths, tenants, prefixes and traces."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from service.errors import ConfigError
from service.sim.arrivals import Arrivals, GammaArrivals, OnOffArrivals, PoissonArrivals
from service.sim.lengths import FixedLength, SeparateLengths, load_lengths, parse_lengths
from service.sim.workload import SharedPrefixes, Tenant, Trace, Workload, parse_tenants

RAGGED = Path(__file__).parents[1] / "data" / "ragged.jsonl"


def gaps(arrivals: Arrivals, count: int = 40_000) -> np.ndarray:
    times = np.array(list(islice(arrivals.times_s(np.random.default_rng(7)), count)))
    assert (np.diff(times) >= 0).all()
    return np.diff(times, prepend=0.0)


def test_poisson_gaps_have_the_mean_and_deviation_of_an_exponential() -> None:
    drawn = gaps(PoissonArrivals(8.0))
    assert drawn.mean() == pytest.approx(1 / 8, rel=0.02)
    assert drawn.std() == pytest.approx(1 / 8, rel=0.02)
    assert (drawn > 0.25).mean() == pytest.approx(np.exp(-2), rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_a_squared_variation_of_one_over_burstiness(burstiness: float) -> None:
    drawn = gaps(GammaArrivals(8.0, burstiness))
    assert drawn.mean() == pytest.approx(1 / 8, rel=0.03)
    assert drawn.var() / drawn.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.06)


def test_on_off_arrivals_come_in_bursts_only_and_keep_the_mean_rate() -> None:
    arrivals = OnOffArrivals(5.0, on_s=2.0, off_s=6.0)
    times = np.array(list(islice(arrivals.times_s(np.random.default_rng(3)), 20_000)))
    assert (times % 8.0 <= 2.0).all()
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("inf"), 1), (1, 0)])
def test_processes_without_a_rate_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="must be a positive number"):
        GammaArrivals(rate, burstiness)


def test_lengths_have_the_moments_that_their_names_promise() -> None:
    rng = np.random.default_rng(0)
    assert parse_lengths("fixed:7").draw(rng, 3).tolist() == [7, 7, 7]
    uniform = parse_lengths("uniform:10:20").draw(rng, 20_000)
    assert (uniform.min(), uniform.max()) == (10, 20)
    assert uniform.mean() == pytest.approx(15, rel=0.01)
    lognormal = parse_lengths("lognormal:200:0.5").draw(rng, 40_000)
    assert np.median(lognormal) == pytest.approx(200, rel=0.02)
    assert lognormal.mean() == pytest.approx(200 * np.exp(0.5**2 / 2), rel=0.02)


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "fixed:0", "fixed:x", "uniform:5:4", "lognormal:5", "lognormal:5:-1", "lognormal:5:nan"),
        *(f"fixed:{2**30 + 1}", f"uniform:1:{2**63}", f"lognormal:{2**63}:1"),
    ],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        parse_lengths(text)


def test_recorded_lengths_are_drawn_in_pairs() -> None:
    recorded = load_lengths(RAGGED)
    assert (recorded.prompt_tokens.sum(), recorded.output_tokens.sum()) == (9206, 3846)
    pairs = set(zip(recorded.prompt_tokens.tolist(), recorded.output_tokens.tolist(), strict=True))
    prompts, outputs = recorded.draw(np.random.default_rng(0), 500)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) <= pairs


def test_same_seed_same_requests_and_tenants_in_their_shares() -> None:
    tenants = (Tenant("heavy", share=10), Tenant("light"))
    lengths = SeparateLengths(parse_lengths("uniform:1:9"), FixedLength(3))
    workload = Workload(PoissonArrivals(50.0), lengths, 11_000, tenants)
    requests = list(workload.requests())
    assert requests == list(workload.requests())
    assert len(requests) == 11_000
    assert sum(request.tenant == 0 for request in requests) == pytest.approx(10_000, rel=0.02)
    assert all(request.output_tokens == 3 and request.prefix == -1 for request in requests)


def test_prefixes_come_before_the_prompt_and_belong_to_one_tenant() -> None:
    tenants = (Tenant("a"), Tenant("b"))
    lengths = SeparateLengths(FixedLength(5), FixedLength(1))
    prefixes = SharedPrefixes(count=3, num_tokens=100, share=0.75)
    requests = list(Workload(PoissonArrivals(1.0), lengths, 8000, tenants, prefixes).requests())
    having = [request for request in requests if request.prefix != -1]
    assert len(having) == pytest.approx(6000, rel=0.03)
    assert {(request.tenant, request.prefix) for request in having} == {(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)}
    assert {(request.prompt_tokens, request.prefix_tokens) for request in requests} == {(105, 100), (5, 0)}


def test_trace_is_replayed_in_order_and_at_the_speed_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 3.0, "prompt_tokens": 4, "output_tokens": 5, "tenant": "b"},
        {"arrival_s": 1.0, "prompt_token_ids": [1, 2], "max_tokens": 6},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = Trace(path, parse_tenants("a,b"), 10, speed=2.0).requests()
    assert (first.arrival_ns, first.tenant, first.prompt_tokens, first.output_tokens) == (500_000_000, 0, 2, 6)
    assert (second.arrival_ns, second.tenant, second.prompt_tokens, second.output_tokens) == (1_500_000_000, 1, 4, 5)


def test_trace_may_be_out_of_order_by_a_thousand_lines_and_not_by_more(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def arrivals(first: list[int]) -> list[int]:
        times = [*first, *range(10, 1010), 5]
        path.write_text(
            "\n".join(json.dumps({"arrival_s": time, "prompt_tokens": 1, "output_tokens": 1}) for time in times)
        )
        return [request.arrival_ns // 10**9 for request in Trace(path, parse_tenants("a"), 9999).requests()]

    assert arrivals([]) == [5, *range(10, 1010)]
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1002: the request arrives before"):
        arrivals([9])


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "[" * 100_000,
        "\udcff",
        "[]",
        '{"prompt_tokens": 1, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 9223372036854775808}',
        '{"arrival_s": 1e9, "prompt_tokens": 1, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "c"}',
    ],
)
def test_bad_line_of_a_trace_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(("\n" + line).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: "):
        list(Trace(path, parse_tenants("a,b"), 10).requests())


def test_request_beyond_what_nanoseconds_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 1e8, "prompt_tokens": 1, "output_tokens": 1}')
    assert [10**17 * 5] == [request.arrival_ns for request in Trace(path, parse_tenants("a"), 1, speed=0.2).requests()]
    with pytest.raises(ConfigError, match=r"arrives after 1e\+09 s"):
        list(Trace(path, parse_tenants("a"), 1, speed=0.1).requests())


def test_tenants_have_shares_and_weights() -> None:
    assert parse_tenants("a:10:2,b") == (Tenant("a", 10.0, 2.0), Tenant("b", 1.0, 1.0))


@pytest.mark.parametrize("text", ["", "a:0", "a:1:2:3", "a:x", "a,a"])
def test_tenants_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        parse_tenants(text)
