"""The engine's loop on a device with its own time: the next step is enqueued while one runs."""

import pytest

from service.core.types import FinishReason
from tests.doubles import PROMPT, run_async, toy_output
from tests.unit.virtual_device import Run


@pytest.mark.parametrize(("can_continue", "expected_ns"), [(False, 8 * 13), (True, 3 + 8 * 10)])
def test_the_host_s_share_of_steps_costs_no_time(can_continue: bool, expected_ns: int) -> None:
    """A prompt's step and seven more: 13 ns each, or 3 and then the device's 10 back to back."""

    async def main() -> None:
        run = Run(can_continue=can_continue)
        run.submit(PROMPT, 8)
        start_ns = run.clock.time_ns
        assert {1: toy_output(PROMPT, 8)} == run.outputs()
        assert expected_ns == run.clock.time_ns - start_ns
        times = run.watcher.times
        assert expected_ns == sum(step.execute_ns for step in times)

    run_async(main())


def test_each_step_is_waited_for_once_behind_the_dispatch_of_the_next() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 6)
        run.outputs()
        assert "".join(run.device.events) == "da" + "wa" * 4 + "ww"

    run_async(main())


@pytest.mark.parametrize(
    ("can_continue", "expected"),
    [
        (False, ["dwd", "dwdwd", "dwdwdwd", "dwdwdwdw"]),
        (True, ["dawa", "dawawa", "dawawaw", "dawawaww"]),
    ],
)
def test_tokens_are_published_when_the_next_steps_are_on_their_way(can_continue: bool, expected: list[str]) -> None:
    async def main() -> None:
        run = Run(can_continue=can_continue)
        run.submit(PROMPT, 4)
        run.outputs()
        assert expected == run.router.published

    run_async(main())


def test_tokens_of_many_requests_are_those_without_overlap() -> None:
    """Prompts of one to eleven tokens, ends by length and by stop token, more requests than rows."""

    async def main() -> None:
        finals = []
        for can_continue in (False, True):
            run = Run(can_continue=can_continue)
            for number in range(40):
                prompt = list(range(number, number + 1 + number % 11))
                stop = toy_output(prompt, 9)[number % 9]
                run.submit(prompt, 4 + number % 13, stop_token_ids=(stop,) if number % 3 else ())
            outputs = run.outputs()
            finals.append((outputs, sorted(run.watcher.reasons)))
            assert ("a" in run.device.events) == can_continue
        assert finals[0] == finals[1]

    run_async(main())


def test_a_stop_token_ends_its_sequence_at_once_though_the_next_step_runs() -> None:
    async def main() -> None:
        run = Run()
        expected = toy_output(PROMPT, 20)
        assert expected[4] not in expected[:4]
        run.submit(PROMPT, 20, stop_token_ids=(expected[4],))
        assert {1: expected[:5]} == run.outputs()
        # Each token takes a step, and the one that follows the last was on its way.
        assert "".join(run.device.events) == "da" + "wa" * 4 + "ww"
        assert run.watcher.reasons == [(1, FinishReason.STOP)]
        assert run.scheduler.counters.totals.num_finished == 1

    run_async(main())


def test_a_request_that_comes_while_steps_overlap_is_admitted_when_both_have_landed() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 8)
        run.device.hooks[2] = lambda: run.submit([7, 8, 9, 10], 4)
        outputs = run.outputs()
        assert outputs == {1: toy_output(PROMPT, 8), 2: toy_output([7, 8, 9, 10], 4)}
        # Step 2 is under way when the request comes; the next plan admits it.
        assert "".join(run.device.events).startswith("da" + "wa" + "ww" + "da")

    run_async(main())


def test_a_cancelled_sequence_gets_no_token_of_the_steps_in_flight() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 50)
        run.submit([7, 8], 8)
        run.device.hooks[3] = lambda: run.inbox.cancel(1)
        outputs = run.outputs()
        assert outputs[2] == toy_output([7, 8], 8)
        assert outputs[1] == toy_output(PROMPT, len(outputs[1])) and len(outputs[1]) <= 3
        assert run.watcher.reasons == [(2, FinishReason.LENGTH)]

    run_async(main())


def test_a_deadline_ends_the_overlap_and_the_sequence() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 100, deadline_ns=run.clock.time_ns + 60)
        run.submit([7, 8], 12)
        outputs = run.outputs()
        assert outputs[2] == toy_output([7, 8], 12)
        # The prompts take 13 ns, and each token after that 10: the fifth is there after 53 ns, when the step of the
        # seventh is planned, and the sixth after 63 ns, when none is planned ahead any more.
        assert outputs[1] == toy_output(PROMPT, 7)
        assert run.watcher.reasons == [(2, FinishReason.LENGTH)]

    run_async(main())


def test_a_closed_inbox_lets_both_steps_in_flight_land() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 50)
        run.device.hooks[4] = run.inbox.close
        run.loop.run()
        assert "".join(run.device.events) == "da" + "wa" * 3 + "ww"
        assert run.scheduler.snapshot().plan is None
        assert run.scheduler.batch.num_tokens[0] == len(PROMPT) + 5

    run_async(main())
