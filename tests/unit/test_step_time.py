"""The step-time model against steps whose prices are known."""

import numpy as np
import pytest

from service.core.step_time import StepLoad, StepTimeModel, load_of
from tests.unit.scheduler_steps import add, make, step

PRICES = np.array([4e6, 30e3, 150e3, 90.0, 12.0])  # of a small model on a processor


def with_chunk(load: StepLoad, num_tokens: int, num_computed_tokens: int) -> StepLoad:
    """`load` and a chunk of `num_tokens` that follows `num_computed_tokens` of the same prompt."""
    return StepLoad(
        load.prefill_tokens + num_tokens,
        load.decode_rows,
        load.context_tokens,
        load.prefill_pairs + num_tokens * (num_computed_tokens + (num_tokens + 1) / 2),
    )


def random_load(rng: np.random.Generator, *, has_prompt: bool) -> StepLoad:
    decode_rows = int(rng.integers(0 if has_prompt else 1, 17))
    load = StepLoad(0, decode_rows, int(decode_rows * rng.integers(20, 1000)))
    return with_chunk(load, int(rng.integers(1, 257)), int(rng.integers(0, 2000))) if has_prompt else load


def taught(num_steps: int, noise: float = 0.0, seed: int = 1, prices: np.ndarray = PRICES) -> StepTimeModel:
    model, rng = StepTimeModel(), np.random.default_rng(seed)
    teach(model, rng, num_steps, noise, prices)
    return model


def teach(
    model: StepTimeModel, rng: np.random.Generator, num_steps: int, noise: float = 0.0, prices: np.ndarray = PRICES
) -> None:
    for _ in range(num_steps):
        load = random_load(rng, has_prompt=bool(rng.random() < 0.5))
        model.observe(load, round(float(load.terms() @ prices) * (1 + noise * rng.standard_normal())))


def test_prices_are_recovered_from_exact_times():
    assert taught(200).prices == pytest.approx(PRICES, rel=1e-3)


def test_predictions_hold_under_noise():
    model, rng = taught(400, noise=0.05), np.random.default_rng(9)
    for has_prompt in (True, False) * 10:
        load = random_load(rng, has_prompt=has_prompt)
        assert model.predict_ns(load) == pytest.approx(float(load.terms() @ PRICES), rel=0.06)
    assert model.spread_ns(StepLoad(decode_rows=1)) == pytest.approx(0.04 * 9e6, rel=0.4)  # E|x| of 5 % of about 9 ms


def test_a_few_very_slow_steps_teach_nothing():
    model, rng = taught(300, noise=0.02), np.random.default_rng(2)
    for _ in range(5):
        load = random_load(rng, has_prompt=True)
        model.observe(load, round(30 * float(load.terms() @ PRICES)))
        teach(model, rng, 20, noise=0.02)
    load = with_chunk(StepLoad(0, 8, 4000), 128, 500)
    assert model.predict_ns(load) == pytest.approx(float(load.terms() @ PRICES), rel=0.05)


def test_a_machine_that_becomes_twice_as_slow_is_followed():
    model, rng = taught(300, noise=0.02), np.random.default_rng(2)
    teach(model, rng, 600, noise=0.02, prices=2 * PRICES)
    load = with_chunk(StepLoad(0, 8, 4000), 128, 500)
    assert model.predict_ns(load) == pytest.approx(2 * float(load.terms() @ PRICES), rel=0.05)


def test_chunks_of_one_token_are_not_taken_for_dear_on_a_machine_that_became_slower():
    model = StepTimeModel()
    for i in range(150):
        load = StepLoad(0, 4, 400 + 4 * i)
        model.observe(load, round(float(load.terms() @ PRICES)))
    for i in range(400):  # no step without a prompt that would show what decoding costs now
        load = with_chunk(StepLoad(0, 4, 1000 + 4 * i), 1, i)
        model.observe(load, round(2 * float(load.terms() @ PRICES)))
        assert model.prices[1] <= 2 * model.predict_ns(load) / 5, "twice an equal share of the step's five tokens"


def test_a_step_that_surprises_is_learned_from_at_once():
    model, load = taught(300), with_chunk(StepLoad(0, 4, 2000), 64, 0)
    usual_ns = model.predict_ns(load)
    model.observe(load, round(3 * usual_ns))
    assert model.predict_ns(load) > 1.001 * usual_ns


def test_the_largest_recent_chunk_fades_step_by_step():
    model = StepTimeModel()
    for num_tokens, expected in ((512, 512.0), (16, 460.8), (0, 460.8), (500, 500.0)):
        model.observe(StepLoad(num_tokens, 1, 10), 1_000_000)
        assert model.recent_prefill_tokens == pytest.approx(expected)


def test_what_a_prompt_costs_is_remembered_over_ten_thousand_steps_without_one():
    model, rng = taught(200), np.random.default_rng(3)
    for _ in range(10_000):
        load = StepLoad(0, 16, int(rng.integers(1600, 16000)))
        model.observe(load, round(float(load.terms() @ PRICES)))
    load = with_chunk(StepLoad(0, 16, 8000), 200, 300)
    assert model.predict_ns(load) == pytest.approx(float(load.terms() @ PRICES), rel=0.03)


@pytest.mark.parametrize(
    ("prices", "noise", "tolerance"), [(PRICES, 0.0, 1e-3), (np.array([0.0, 1e6, 1e6, 0.0, 0.0]), 0.01, 0.03)]
)
def test_prices_outlast_what_is_left_of_the_steps_that_told_them(prices: np.ndarray, noise: float, tolerance: float):
    """Of steps with decode rows 0.99 ** 71,000 is left, a number without all its digits, and then nothing."""
    model, rng = StepTimeModel(), np.random.default_rng(0)
    mixed = [with_chunk(StepLoad(0, rows, 250 + 50 * rows), 64, 0) for rows in (1, 2, 3)]
    chunks = [with_chunk(StepLoad(), num_tokens, 0) for num_tokens in range(64, 104)]
    for load in chunks + mixed:
        model.observe(load, round(float(load.terms() @ prices)))
    for number in range(75_000):
        load = with_chunk(StepLoad(), int(rng.integers(16, 512)), 0)
        model.observe(load, round(float(load.terms() @ prices) * (1 + noise * rng.standard_normal())))
        if number > 70_000 and number % 32 == 0:
            assert np.isfinite(model.prices).all()
            for probe in (chunks[0], mixed[0], mixed[2]):
                assert model.predict_ns(probe) == pytest.approx(float(probe.terms() @ prices), rel=tolerance)


def test_a_fit_that_is_not_finite_is_not_taken():
    model = StepTimeModel()
    for rows in range(1, 60):
        model.observe(StepLoad(0, rows, 10 * rows), 10_000_000 + 100_000 * rows)
    prices = model.prices.tolist()
    model.observe(StepLoad(100_000), 10**305)  # their product is no number
    with np.errstate(all="ignore"):
        assert model.prices.tolist() == prices


def test_no_price_is_negative_when_times_fall_with_the_load():
    model = StepTimeModel()
    for rows in range(1, 60):
        model.observe(StepLoad(0, rows, 10 * rows), 10_000_000 - 100_000 * rows)
    assert model.prices.min() >= 0.0
    assert model.predict_ns(StepLoad(0, 10, 100)) > 5e6


def test_a_chunk_fills_the_time_that_is_left():
    model, load = taught(300), StepLoad(0, 8, 4000)
    for num_computed_tokens in (0, 3000):
        chunk = round(model.chunk_for(7e6, num_computed_tokens))
        added_ns = model.predict_ns(with_chunk(load, chunk, num_computed_tokens)) - model.predict_ns(load)
        assert added_ns == pytest.approx(7e6, rel=0.02)
    assert StepTimeModel().chunk_for(1.0, 0) == float("inf")
    assert model.chunk_for(-1.0, 0) == 0.0


def test_the_least_answer_is_the_prompt_in_the_fewest_steps_and_the_tokens_that_must_come():
    model = taught(300)
    assert model.least_answer_ns(1000, 1000, 1, max_step_tokens=512) == pytest.approx(2 * 4e6 + 1000 * 30e3, rel=1e-3)
    decode_ns = 4e6 + 150e3 + 90 * 1000
    both_ns = 2 * 4e6 + 1000 * 30e3 + 9 * decode_ns
    assert model.least_answer_ns(1000, 1000, 10, max_step_tokens=512) == pytest.approx(both_ns, rel=1e-3)
    assert StepTimeModel().least_answer_ns(1000, 1000, 10, 512) == 0.0


@pytest.mark.parametrize("num_prefill_tokens", [30_000, 1])
def test_the_least_answer_attends_to_its_own_prompt_whatever_is_computed_before(num_prefill_tokens: int):
    """Other prompts that are computed before, or an own one that is all but cached; in one step."""
    prefill_ns, decode_ns = 4e6 + num_prefill_tokens * 30e3, 4e6 + 150e3 + 90 * 200
    least_ns = taught(300).least_answer_ns(num_prefill_tokens, 200, 251, max_step_tokens=30_000)
    assert least_ns == pytest.approx(prefill_ns + 250 * decode_ns, rel=1e-3)


def test_load_counts_tokens_rows_contexts_and_pairs():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, num_tokens=3)
    step(scheduler)
    add(scheduler, 2, num_tokens=9)
    plan = scheduler.plan(0)
    assert plan is not None
    # 1 decodes its 4th token, the chunk has positions 0 to 6 that attend to 1, 2, ..., 7 tokens.
    assert load_of(plan, scheduler.batch) == StepLoad(7, 1, 4, 28.0)
