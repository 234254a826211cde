"""The engine's life: start, idle, stop, death."""

import asyncio
import threading

import numpy as np
import pytest

from service.clock import MonotonicClock
from service.core.scheduler import Scheduler
from service.core.types import SamplingParams
from service.engine.client import Terms
from service.engine.engine import Engine
from service.engine.health import EngineState, Heartbeat
from service.engine.scheduling import SchedulingSettings, scheduler_config
from service.engine.settings import EngineSettings
from service.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    ExecutorError,
    InvalidRequestError,
    OverloadedError,
)
from tests.doubles import (
    LIMITS,
    PROMPT,
    GatedExecutor,
    ManualClock,
    NullObserver,
    eventually,
    run_async,
    served_toy,
    toy_output,
)

PROMPT_IDS = np.array(PROMPT, np.int32)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def test_engine_that_cannot_warm_up_does_not_start() -> None:
    async def main() -> None:
        executor = GatedExecutor()
        executor.warm_up_error = ExecutorError("no")
        settings = EngineSettings()
        scheduler = Scheduler(scheduler_config(LIMITS, settings))
        engine = Engine(
            scheduler, executor, settings, eos_token_ids=(), clock=MonotonicClock(), observer=NullObserver()
        )
        with pytest.raises(ExecutorError, match="no"):
            await engine.start()
        assert (engine.state, executor.is_closed) == (EngineState.DEAD, True)

    run_async(main())


def test_a_start_that_is_given_up_leaves_no_thread_behind() -> None:
    async def main() -> None:
        is_warming, may_go_on = threading.Event(), threading.Event()

        class SlowExecutor(GatedExecutor):
            def warm_up(self) -> None:
                is_warming.set()
                may_go_on.wait()

        executor, settings = SlowExecutor(), EngineSettings()
        scheduler = Scheduler(scheduler_config(LIMITS, settings))
        engine = Engine(
            scheduler, executor, settings, eos_token_ids=(), clock=MonotonicClock(), observer=NullObserver()
        )
        starting = asyncio.create_task(engine.start())
        await asyncio.to_thread(is_warming.wait)
        starting.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert executor.is_closed
        assert not [thread for thread in threading.enumerate() if thread.name == "engine"]

    run_async(main())


def test_close_ends_open_streams_and_frees_the_executor() -> None:
    async def main() -> None:
        async with served_toy() as toy:
            toy.executor.close_gate()
            stream = toy.engine.submit(PROMPT_IDS, GREEDY)
            toy.executor.allow(1)
            await anext(stream)
            toy.executor.allow(1)
            await toy.engine.close()
            with pytest.raises(DrainingError):
                while True:
                    await anext(stream)
            with pytest.raises(DrainingError):
                toy.engine.submit(PROMPT_IDS, GREEDY)
            await toy.engine.close()
        assert (toy.engine.state, toy.executor.is_closed) == (EngineState.STOPPED, True)
        assert not [thread for thread in threading.enumerate() if thread.name == "engine"]

    run_async(main())


def test_executor_that_cannot_close_does_not_keep_the_engine_from_ending() -> None:
    async def main() -> None:
        async with served_toy() as toy:
            toy.executor.close_error = ValueError("stuck")
            await toy.engine.close()
            assert (str(await toy.engine.wait_ended()), toy.engine.state) == ("stuck", EngineState.DEAD)

    run_async(main())


def test_room_of_cancelled_requests_goes_to_new_ones_within_one_step() -> None:
    """The queue is refilled while the step that would have taken notice of the cancels is still running."""

    async def main() -> None:
        num_waiting = 20
        async with served_toy(settings=EngineSettings(max_waiting_requests=num_waiting)) as toy:
            toy.executor.close_gate()
            first = toy.engine.submit(PROMPT_IDS, GREEDY)
            await eventually(lambda: toy.scheduler.counters.totals.num_submitted == 1)
            old = [toy.engine.submit(PROMPT_IDS, GREEDY) for _ in range(num_waiting - 1)]
            toy.executor.allow(1)
            await anext(first)
            await eventually(lambda: toy.scheduler.counters.totals.num_submitted == num_waiting)
            for stream in old:
                toy.engine.cancel(stream.seq_id)
            new = [toy.engine.submit(PROMPT_IDS, GREEDY) for _ in range(num_waiting)]
            toy.executor.allow(999)
            answers = [[token_id async for batch in stream for token_id in batch.token_ids] for stream in new]
        assert answers == [toy_output(PROMPT, 6)] * num_waiting

    run_async(main())


def test_failures_are_forgotten_with_the_sequences_that_met_them() -> None:
    async def main() -> None:
        passing = ExecutorError("passing", is_transient=True)
        settings = EngineSettings(max_step_retries=1, retry_pause_s=1000.0)
        async with served_toy(settings=settings) as toy:
            for _ in range(3):
                toy.executor.errors.append(passing)
                stream = toy.engine.submit(PROMPT_IDS, GREEDY)
                await eventually(lambda: not toy.executor.errors)
                toy.engine.cancel(stream.seq_id)
                await eventually(lambda: not toy.scheduler.has_work)
            token_ids = [i async for batch in toy.engine.submit(PROMPT_IDS, GREEDY) for i in batch.token_ids]
        assert token_ids == toy_output(PROMPT, 6)

    run_async(main())


def test_commands_do_not_cut_the_pause_before_a_retry_short() -> None:
    async def main() -> None:
        settings = EngineSettings(max_step_retries=1, retry_pause_s=1000.0)
        async with served_toy(settings=settings) as toy:
            toy.executor.errors += [ExecutorError("passing", is_transient=True) for _ in range(2)]
            toy.engine.submit(PROMPT_IDS, GREEDY)
            await eventually(lambda: len(toy.executor.errors) == 1)
            for num_submitted in range(2, 12):
                stream = toy.engine.submit(PROMPT_IDS, GREEDY)
                await eventually(lambda: toy.scheduler.counters.totals.num_submitted == num_submitted)  # noqa: B023
                toy.engine.cancel(stream.seq_id)
            assert (toy.executor.num_steps, toy.engine.state) == (1, EngineState.READY)

    run_async(main())


def test_request_that_cannot_be_sampled_fails_alone() -> None:
    async def main() -> None:
        async with served_toy() as toy:
            toy.executor.close_gate()
            bad, good = (toy.engine.submit(PROMPT_IDS, GREEDY) for _ in range(2))
            toy.executor.failing_seq_ids = [bad.seq_id]
            toy.executor.allow(99)
            with pytest.raises(ExecutorError, match="no logits"):
                await anext(bad)
            token_ids = [token_id async for batch in good for token_id in batch.token_ids]
            assert toy.has_all_blocks_free
        assert token_ids == toy_output(PROMPT, 6)

    run_async(main())


def test_draining_engine_finishes_what_it_has() -> None:
    async def main() -> None:
        async with served_toy() as toy:
            toy.executor.close_gate()
            stream = toy.engine.submit(PROMPT_IDS, GREEDY)
            toy.engine.drain()
            with pytest.raises(DrainingError):
                toy.engine.submit(PROMPT_IDS, GREEDY)
            toy.executor.allow(99)
            token_ids = [token_id async for batch in stream for token_id in batch.token_ids]
        assert token_ids == toy_output(PROMPT, 6)

    run_async(main())


def test_close_leaves_a_thread_behind_that_is_stuck_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("service.engine.engine._WATCH_PERIOD_S", 0.01)
        async with served_toy(settings=EngineSettings(stuck_after_s=1e-6)) as toy:
            toy.executor.close_gate()
            stream = toy.engine.submit(PROMPT_IDS, GREEDY)
            await eventually(lambda: not toy.engine.is_alive)
            await toy.engine.close()
            assert (toy.engine.state, toy.executor.is_closed) == (EngineState.DEAD, False)
            with pytest.raises(EngineDeadError):
                await anext(stream)
            toy.executor.allow(1)  # a step that ends after all changes nothing
            await eventually(lambda: toy.executor.is_closed)
            assert "taken longer than 1e-06 s" in str(await toy.engine.wait_ended())

    run_async(main())


def test_idle_engine_runs_no_steps_and_is_alive() -> None:
    async def main() -> None:
        async with served_toy(settings=EngineSettings(stuck_after_s=1e-6)) as toy:
            [batch async for batch in toy.engine.submit(PROMPT_IDS, GREEDY)]
            num_steps = toy.executor.num_steps
            await eventually(lambda: toy.engine.is_alive)
            assert num_steps == 6
            assert toy.executor.num_steps == num_steps

    run_async(main())


def test_a_deadline_passes_while_a_batch_is_gathered_and_the_engine_is_alive() -> None:
    async def main() -> None:
        clock, settings = ManualClock(), EngineSettings(stuck_after_s=1e-6)
        gathering = SchedulingSettings(batching="dynamic", batch_window_ms=60_000.0)
        async with served_toy(settings=settings, scheduling=gathering, clock=clock) as toy:
            stream = toy.engine.submit(PROMPT_IDS, GREEDY, Terms(deadline_ns=clock.time_ns + 1_000_000))
            await eventually(lambda: toy.scheduler.counters.num_waiting == 1)
            clock.time_ns += 1_000_000
            with pytest.raises(DeadlineExceededError):
                await anext(stream)
            toy.engine.submit(PROMPT_IDS, GREEDY)
            await eventually(lambda: toy.scheduler.counters.num_waiting == 1)
            clock.time_ns += 1_000_000
            await eventually(lambda: toy.engine.is_alive)

    run_async(main())


def test_step_that_takes_too_long_fails_liveness_and_nothing_is_taken_till_it_ends() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with served_toy(settings=EngineSettings(stuck_after_s=1.0), clock=clock) as toy:
            toy.executor.close_gate()
            streams = [toy.engine.submit(PROMPT_IDS, GREEDY) for _ in range(2)]
            await eventually(lambda: toy.executor.num_arrived == 1)
            clock.time_ns += 1_000_000_000
            toy.engine.abandon_if_stuck()
            assert (toy.engine.is_alive, toy.engine.num_open_streams) == (True, 2)
            clock.time_ns += 1
            assert not toy.engine.is_alive
            with pytest.raises(EngineDeadError, match="longer than 1 s"):
                toy.engine.submit(PROMPT_IDS, GREEDY)
            with pytest.raises(EngineDeadError):
                toy.engine.check_room(1)
            for _ in range(2):
                toy.engine.abandon_if_stuck()
            for stream in streams:
                with pytest.raises(EngineDeadError):
                    await anext(stream)
            toy.executor.allow(99)
            await eventually(lambda: toy.engine.is_alive and not toy.scheduler.has_work)
            token_ids = [
                token_id async for batch in toy.engine.submit(PROMPT_IDS, GREEDY) for token_id in batch.token_ids
            ]
            assert toy.has_all_blocks_free
        assert token_ids == toy_output(PROMPT, 6)

    run_async(main())


def test_a_process_that_was_paused_goes_on_with_its_streams() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with served_toy(settings=EngineSettings(stuck_after_s=1.0), clock=clock) as toy:
            toy.executor.close_gate()
            stream = toy.engine.submit(PROMPT_IDS, GREEDY)
            for num_steps in range(1, 4):
                await eventually(lambda: toy.executor.num_arrived == num_steps)  # noqa: B023
                clock.time_ns += 600_000_000_000
                toy.engine.abandon_if_stuck()  # before the step that was paused could end
                toy.executor.allow(1)
            await eventually(lambda: toy.executor.num_arrived == 4)
            toy.engine.abandon_if_stuck()
            toy.executor.allow(99)
            token_ids = [token_id async for batch in stream for token_id in batch.token_ids]
        assert token_ids == toy_output(PROMPT, 6)

    run_async(main())


def test_dead_engine_is_not_alive_and_keeps_its_error() -> None:
    async def main() -> None:
        async with served_toy() as toy:
            toy.executor.errors.append(ExecutorError("for good"))
            with pytest.raises(EngineDeadError):
                await anext(toy.engine.submit(PROMPT_IDS, GREEDY))
            error = await toy.engine.wait_ended()
            assert (str(error), toy.engine.state, toy.engine.is_alive) == ("for good", EngineState.DEAD, False)
            with pytest.raises(EngineDeadError):
                toy.engine.submit(PROMPT_IDS, GREEDY)

    run_async(main())


def test_slow_reader_is_ended_and_its_blocks_are_free() -> None:
    async def main() -> None:
        async with served_toy(settings=EngineSettings(max_pending_tokens=2)) as toy:
            toy.executor.close_gate()
            toy.engine.submit(PROMPT_IDS, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
            toy.executor.allow(3)
            await eventually(lambda: not toy.engine.num_open_streams)
            toy.executor.allow(1)
            await eventually(lambda: toy.has_all_blocks_free and not toy.scheduler.has_work)
            assert toy.executor.num_steps <= 4

    run_async(main())


def test_tokens_within_the_stream_interval_come_together() -> None:
    async def main() -> None:
        async with served_toy(settings=EngineSettings(stream_interval_ms=1e-5), clock=ManualClock()) as toy:
            toy.executor.close_gate()
            stream = toy.engine.submit(PROMPT_IDS, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            toy.executor.allow(1)
            first = await anext(stream)
            toy.executor.allow(3)
            rest = await anext(stream)
            assert [first.token_ids, rest.token_ids] == [toy_output(PROMPT, 4)[:1], toy_output(PROMPT, 4)[1:]]

    run_async(main())


def test_concurrent_requests_under_preemption_get_what_each_gets_alone() -> None:
    """Eight sequences of 32 tokens want 64 blocks; half of them are there."""

    async def main() -> None:
        small = type(LIMITS)(num_blocks=33, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)
        sampling = SamplingParams(max_tokens=29, temperature=0.0, ignore_eos=True)
        async with served_toy(small) as toy:

            async def answer(first: int) -> list[int]:
                stream = toy.engine.submit(np.array([first, 17, 333], np.int32), sampling)
                return [token_id async for batch in stream for token_id in batch.token_ids]

            answers = await asyncio.gather(*(answer(first) for first in range(8)))
            assert toy.scheduler.counters.totals.num_preemptions > 0
            assert toy.has_all_blocks_free
        assert answers == [toy_output([first, 17, 333], 29) for first in range(8)]

    run_async(main())


def test_heartbeat_is_silent_only_while_a_step_runs() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.silence_ns(now_ns=500) == 0
    heartbeat.beat(100)
    assert heartbeat.silence_ns(now_ns=500) == 400
    heartbeat.rest()
    assert heartbeat.silence_ns(now_ns=10**12) == 0


def test_samples_enter_the_queue_together_or_not_at_all() -> None:
    async def main() -> None:
        async with served_toy(settings=EngineSettings(max_waiting_requests=3)) as toy:
            toy.executor.close_gate()
            toy.engine.submit(PROMPT_IDS, GREEDY)
            with pytest.raises(OverloadedError):
                toy.engine.submit_samples(PROMPT_IDS, [GREEDY] * 3)
            assert toy.engine.num_open_streams == 1
            assert len(toy.engine.submit_samples(PROMPT_IDS, [GREEDY] * 2)) == 2
            toy.executor.allow(float("inf"))
            await eventually(lambda: not toy.engine.num_open_streams)
            assert toy.scheduler.counters.totals.num_submitted == 3

    run_async(main())


def test_more_samples_than_the_queue_ever_holds_are_invalid() -> None:
    async def main() -> None:
        async with served_toy(settings=EngineSettings(max_waiting_requests=3)) as toy:
            with pytest.raises(InvalidRequestError, match="n: 4 is not allowed: at most 3 "):
                toy.engine.submit_samples(PROMPT_IDS, [GREEDY] * 4)
            assert len(toy.engine.submit_samples(PROMPT_IDS, [GREEDY] * 3)) == 3

    run_async(main())


def test_an_empty_queue_takes_all_samples_of_any_prompt() -> None:
    async def main() -> None:
        async with served_toy(settings=EngineSettings(max_waiting_tokens=4)) as toy:
            toy.executor.close_gate()
            assert len(toy.engine.submit_samples(PROMPT_IDS, [GREEDY] * 4)) == 4
            with pytest.raises(OverloadedError):
                toy.engine.submit(PROMPT_IDS, GREEDY)

    run_async(main())
