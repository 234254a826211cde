"""Steps that fail while another is enqueued or runs: both are planned again, or the loop ends."""

import pytest

from service.engine.settings import EngineSettings
from service.errors import ExecutorError
from tests.doubles import PROMPT, run_async, toy_output
from tests.unit.virtual_device import Run

PASSING = ExecutorError("passing", is_transient=True)


def test_tokens_are_published_before_the_pause_of_a_step_that_failed() -> None:
    async def main() -> None:
        run = Run(can_continue=False)
        run.device.dispatch_errors = {1: PASSING}
        run.submit(PROMPT, 2)
        run.outputs()
        assert run.router.published == ["dwD", "dwDdw"]

    run_async(main())


@pytest.mark.parametrize(("can_continue", "expected"), [(False, ["dwD"]), (True, ["dawD", "dawDw"])])
def test_tokens_of_steps_that_landed_are_published_when_the_device_breaks(
    can_continue: bool, expected: list[str]
) -> None:
    async def main() -> None:
        run = Run(can_continue=can_continue)
        run.device.dispatch_errors = {2 if can_continue else 1: ExecutorError("broken")}
        run.submit(PROMPT, 8)
        with pytest.raises(ExecutorError, match="broken"):
            run.loop.run()
        assert expected == run.router.published

    run_async(main())


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("has_both", [False, True])
def test_a_step_that_fails_takes_the_one_behind_it_along(number: int, has_both: bool) -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 8)
        run.submit([7, 8], 6)
        run.device.wait_errors = {number: PASSING, **({number + 1: PASSING} if has_both else {})}
        assert run.outputs() == {1: toy_output(PROMPT, 8), 2: toy_output([7, 8], 6)}
        assert run.watcher.failed_steps[0] == (number, True)

    run_async(main())


@pytest.mark.parametrize("number", range(1, 8))
def test_a_step_that_cannot_follow_is_planned_again(number: int) -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 8)
        run.device.dispatch_errors = {number: PASSING}
        assert run.outputs() == {1: toy_output(PROMPT, 8)}
        assert run.watcher.failed_steps == [(number, True)]

    run_async(main())


def test_retries_of_overlapping_steps_are_bounded() -> None:
    async def main() -> None:
        run = Run(settings=EngineSettings(retry_pause_s=0.0, max_step_retries=2))
        run.submit(PROMPT, 8)
        run.device.wait_errors = dict.fromkeys(range(3, 100), PASSING)
        with pytest.raises(ExecutorError, match="passing"):
            run.loop.run()
        assert [will_retry for _, will_retry in run.watcher.failed_steps] == [True, True, False]
        assert run.device.num_in_flight == 0

    run_async(main())


def test_a_step_that_cannot_follow_ends_the_overlap_for_a_pause_and_such_pauses_are_bounded() -> None:
    """A step takes 13 ns. The first one ahead fails at 7 ns, the next is tried no earlier than 107, and fails at 111.

    That one is tried when the eighth step since is dispatched, at 108 ns; the last one no earlier than 311, with the
    sixteenth since, at 316.
    """

    async def main() -> None:
        run = Run(settings=EngineSettings(retry_pause_s=1e-7, max_step_retries=2))
        run.clock.time_ns = 1
        run.submit(PROMPT, 60)
        run.device.ahead_error = PASSING
        with pytest.raises(ExecutorError, match="passing"):
            run.loop.run()
        assert "".join(run.device.events) == "dDw" + "dw" * 7 + "dDw" + "dw" * 15 + "dDw"
        assert [will_retry for _, will_retry in run.watcher.failed_steps] == [True, True, False]
        assert run.watcher.tokens == {1: toy_output(PROMPT, 25)}

    run_async(main())


def test_a_step_ahead_that_lands_after_another_could_not_follow_does_not_end_the_pause() -> None:
    """The second step ahead fails at 17 ns, the first lands at 24; steps of 13 ns follow, until one of 118 ns."""

    async def main() -> None:
        run = Run(settings=EngineSettings(retry_pause_s=1e-7))
        run.clock.time_ns = 1
        run.submit(PROMPT, 20)
        run.device.dispatch_errors = {2: PASSING}
        assert run.outputs() == {1: toy_output(PROMPT, 20)}
        assert "".join(run.device.events).startswith("da" + "wDw" + "dw" * 7 + "da" + "wa")

    run_async(main())


def test_a_step_that_landed_makes_up_for_those_that_failed() -> None:
    async def main() -> None:
        run = Run(can_continue=False, settings=EngineSettings(retry_pause_s=0.0, max_step_retries=1))
        run.submit(PROMPT, 8)
        run.device.wait_errors = {1: PASSING, 4: PASSING}
        assert run.outputs() == {1: toy_output(PROMPT, 8)}
        assert run.watcher.failed_steps == [(1, True), (3, True)]

    run_async(main())


def test_a_step_that_followed_makes_up_for_those_that_could_not() -> None:
    async def main() -> None:
        run = Run(settings=EngineSettings(retry_pause_s=0.0, max_step_retries=1))
        run.submit(PROMPT, 12)
        run.device.dispatch_errors = {1: PASSING, 5: PASSING}
        assert run.outputs() == {1: toy_output(PROMPT, 12)}
        assert "".join(run.device.events).startswith("dDw" + "da" + "wa" + "wD" + "w" + "da")

    run_async(main())


def test_the_graver_error_of_two_steps_decides() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 8)
        run.device.wait_errors = {2: PASSING, 3: ExecutorError("broken")}
        with pytest.raises(ExecutorError, match="broken"):
            run.loop.run()
        assert run.watcher.failed_steps == [(2, False)]

    run_async(main())


def test_a_device_that_is_broken_at_the_step_ahead_ends_the_loop() -> None:
    async def main() -> None:
        run = Run()
        run.submit(PROMPT, 8)
        run.device.dispatch_errors = {2: ExecutorError("broken")}
        with pytest.raises(ExecutorError, match="broken"):
            run.loop.run()
        assert "".join(run.device.events) == "da" + "wD" + "w"
        assert run.scheduler.snapshot().plan is None
        assert run.watcher.tokens == {1: toy_output(PROMPT, 2)}

    run_async(main())
