"""An engine's loop on a device with its own time, for tests of steps that overlap."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.types import Request, SamplingParams, StepDelta, StepResult
from service.engine.health import Heartbeat
from service.engine.inbox import Inbox
from service.engine.loop import EngineLoop
from service.engine.observer import StepTimes
from service.engine.router import OutputRouter
from service.engine.scheduling import scheduler_config
from service.engine.settings import EngineSettings
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits, StepHandle
from service.executor.simulated import SimulatedExecutor
from tests.doubles import VOCAB_SIZE, ManualClock

LIMITS = ExecutorLimits(num_blocks=65, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=128)
HOST_NS, DEVICE_NS = 3, 10  # of a dispatch, and of a step


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
