"""The engine's loop on a device with its own time: the next step is enqueued while one runs."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from service.commands.assembly import scheduler_config
from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.types import FinishReason, Request, SamplingParams, StepDelta, StepResult
from service.engine.health import Heartbeat
from service.engine.inbox import Inbox
from service.engine.loop import EngineLoop
from service.engine.observer import StepTimes
from service.engine.router import OutputRouter
from service.engine.settings import EngineSettings
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits, StepHandle
from service.executor.simulated import SimulatedExecutor
from tests.doubles import PROMPT, VOCAB_SIZE, ManualClock, run_async, toy_output

LIMITS = ExecutorLimits(num_blocks=65, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=128)
HOST_NS, DEVICE_NS = 3, 10  # of a dispatch, and of a step
PASSING = ExecutorError("passing", is_transient=True)


class VirtualDevice:
    """Steps run one after the other, each in `DEVICE_NS`, from when the host has enqueued them in `HOST_NS`."""

    def __init__(self, clock: ManualClock, *, can_continue: bool) -> None:
        self.limits = LIMITS
        self.clock = clock
        self.events: list[str] = []  # d: dispatched; a: dispatched ahead; w: waited for
        self.dispatch_errors: dict[int, ExecutorError] = {}  # by the number of the dispatch
        self.wait_errors: dict[int, ExecutorError] = {}
        self.ahead_error: ExecutorError | None = None  # of whatever is dispatched ahead
        self.hooks: dict[int, Callable[[], object]] = {}  # called at the end of a dispatch
        self.num_dispatches = 0
        self.num_in_flight = 0
        self._free_ns = 0
        self._can_continue = can_continue
        self._inner = SimulatedExecutor(LIMITS, VOCAB_SIZE, can_continue=can_continue)

    def warm_up(self) -> None:
        """Nothing is cold here."""

    def dispatch(self, plan: StepPlan, batch: BatchState) -> StepHandle:
        number = self.num_dispatches
        self.num_dispatches += 1
        self.clock.time_ns += HOST_NS
        error = self.dispatch_errors.get(number, self.ahead_error if plan.is_ahead else None)
        if error is not None:
            self.events.append("D")
            raise error
        assert self.num_in_flight == int(plan.is_ahead)
        result = self._inner.dispatch(plan, batch).wait()
        self._free_ns = max(self._free_ns, self.clock.time_ns) + DEVICE_NS
        self.num_in_flight += 1
        self.events.append("a" if plan.is_ahead else "d")
        self.hooks.get(number, lambda: None)()
        return VirtualStep(self, number, self._free_ns, result, can_continue=self._can_continue)

    def close(self) -> None:
        """Nothing is held."""


class VirtualStep:
    def __init__(self, device: VirtualDevice, number: int, done_ns: int, result: StepResult, *, can_continue: bool):
        self.can_continue = can_continue
        self._device, self._number, self._done_ns, self._result = device, number, done_ns, result

    def wait(self) -> StepResult:
        device = self._device
        device.events.append("w")
        device.num_in_flight -= 1
        device.clock.time_ns = max(device.clock.time_ns, self._done_ns)
        if self._number in device.wait_errors:
            raise device.wait_errors[self._number]
        return self._result


class Watcher:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.failed_steps: list[tuple[int, bool]] = []
        self.times: list[StepTimes] = []
        self.tokens: dict[int, list[int]] = {}
        self.reasons: list[tuple[int, int]] = []

    def on_step(self, plan: StepPlan, delta: StepDelta, times: StepTimes) -> None:
        self.times.append(times)
        columns = (delta.seq_ids.tolist(), delta.token_ids.tolist(), delta.finish_reasons.tolist())
        for seq_id, token_id, reason in zip(*columns, strict=True):
            self.tokens.setdefault(seq_id, []).append(token_id)
            if reason:
                self.reasons.append((seq_id, reason))

    def on_step_failed(self, step_id: int, error: Exception, *, will_retry: bool) -> None:
        self.failed_steps.append((step_id, will_retry))

    def on_death(self, error: Exception) -> None:
        """Nobody asks."""


class LastRest(Heartbeat):
    """Closes the inbox when the loop would sleep with all work done, however that ended."""

    def __init__(self, scheduler: Scheduler, inbox: Inbox) -> None:
        super().__init__()
        self._scheduler, self._inbox = scheduler, inbox

    def rest(self) -> None:
        super().rest()
        totals = self._scheduler.counters.totals
        if 0 < totals.num_submitted == totals.num_finished:
            self._inbox.close()


class MarkingRouter(OutputRouter):
    """Keeps, of each step, what the device had been asked for when the step's tokens were published."""

    def __init__(self, device: VirtualDevice, on_abandoned: Callable[[int], None]) -> None:
        super().__init__(asyncio.get_running_loop(), device.clock, on_abandoned)
        self.published: list[str] = []
        self._device = device

    def publish(self, delta: StepDelta) -> None:
        assert delta.step_id == len(self.published)
        self.published.append("".join(self._device.events))
        super().publish(delta)


class Run:
    """A loop with its parts, whose output the watcher gathers: no stream is open."""

    def __init__(self, *, can_continue: bool = True, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings(retry_pause_s=0.0)
        self.clock = ManualClock()
        self.device = VirtualDevice(self.clock, can_continue=can_continue)
        config = replace(scheduler_config(LIMITS, settings), watermark_fraction=0.0)
        self.scheduler, self.inbox = Scheduler(config), Inbox(100)
        router = self.router = MarkingRouter(self.device, self.inbox.cancel)
        self.watcher, heartbeat = Watcher(), LastRest(self.scheduler, self.inbox)
        self.loop = EngineLoop(
            self.scheduler, self.device, self.inbox, router, settings, self.clock, heartbeat, self.watcher
        )
        self.num_submitted = 0

    def submit(self, prompt: list[int], max_tokens: int, deadline_ns: int | None = None, **sampling: object) -> None:
        self.num_submitted += 1
        seq_id = self.num_submitted
        params = SamplingParams(max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
        now_ns = self.clock.time_ns
        prompt_ids = np.array(prompt, np.int32)
        self.inbox.submit(Request(seq_id, prompt_ids, params, arrival_ns=now_ns, deadline_ns=deadline_ns))

    def outputs(self) -> dict[int, list[int]]:
        """Run the loop until nothing is left to do: the tokens of each request."""
        self.loop.run()
        assert self.device.num_in_flight == 0
        assert self.scheduler.counters.num_free_blocks == LIMITS.num_blocks - 1
        return self.watcher.tokens


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
