"""Step deltas become batches of tokens on the event loop."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from service.core.types import FinishReason, StepDelta, TokenLogprobs
from service.engine.router import OutputRouter
from service.engine.stream import TokenBatch, TokenStream
from service.errors import DeadlineExceededError, ExecutorError, SlowConsumerError, UnserviceableError
from tests.doubles import ManualClock, run_async


def delta(
    tokens: Sequence[tuple[int, int, FinishReason]], logprobs: dict[int, TokenLogprobs] | None = None
) -> StepDelta:
    seq_ids, token_ids, reasons = zip(*tokens, strict=True) if tokens else ((), (), ())
    return StepDelta(
        0, np.array(seq_ids, np.int64), np.array(token_ids, np.int32), np.array(reasons, np.int8), logprobs or {}
    )


class Setup:
    """A router with streams 1 and 2 open."""

    def __init__(self, max_pending_tokens: int = 100, interval_ns: int = 0) -> None:
        self.clock = ManualClock()
        self.abandoned: list[int] = []
        self.router = OutputRouter(asyncio.get_running_loop(), self.clock, self.abandoned.append)
        self.streams = {seq_id: TokenStream(seq_id, 10 * seq_id, max_pending_tokens, interval_ns) for seq_id in (1, 2)}
        for stream in self.streams.values():
            self.router.open(stream)

    async def publish(self, *tokens: tuple[int, int, FinishReason]) -> None:
        self.router.publish(delta(tokens))
        await asyncio.sleep(0)


GO_ON, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


def test_each_sequence_gets_its_own_tokens_in_order() -> None:
    async def main() -> None:
        setup = Setup()
        await setup.publish((1, 11, GO_ON), (2, 21, GO_ON))
        assert await anext(setup.streams[2]) == TokenBatch([21], [], GO_ON)
        await setup.publish((2, 22, LENGTH), (1, 12, GO_ON))
        await setup.publish((1, 13, STOP))
        assert await anext(setup.streams[1]) == TokenBatch([11, 12, 13], [], STOP)
        assert await anext(setup.streams[2]) == TokenBatch([22], [], LENGTH)
        for stream in setup.streams.values():
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert (setup.router.num_open, setup.abandoned) == (0, [])

    run_async(main())


def test_one_step_costs_one_call_of_the_loop() -> None:
    async def main() -> None:
        setup = Setup()
        calls: list[object] = []
        loop = asyncio.get_running_loop()

        class CountingLoop:
            def call_soon_threadsafe(self, callback: object, *args: object) -> None:
                calls.append(callback)
                loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]

        router = OutputRouter(CountingLoop(), setup.clock, setup.abandoned.append)  # type: ignore[arg-type]
        router.publish(delta([(seq_id, 1, GO_ON) for seq_id in range(500)]))
        router.publish(delta([]))
        assert len(calls) == 1

    run_async(main())


def test_waiting_reader_is_woken_by_the_first_token() -> None:
    async def main() -> None:
        setup = Setup()
        reader = asyncio.create_task(anext(setup.streams[1]))
        await asyncio.sleep(0)
        await setup.publish((1, 11, GO_ON))
        assert (await reader).token_ids == [11]

    run_async(main())


def test_logprobs_go_with_their_token() -> None:
    async def main() -> None:
        setup = Setup()
        entry = TokenLogprobs(-0.5, np.array([3], np.int32), np.array([-0.5], np.float32))
        setup.router.publish(delta([(1, 11, GO_ON), (2, 21, GO_ON)], {1: entry}))
        await asyncio.sleep(0)
        assert (await anext(setup.streams[1])).logprobs == []
        assert (await anext(setup.streams[2])).logprobs == [entry]

    run_async(main())


def test_closed_sequence_gets_nothing_and_closing_is_idempotent() -> None:
    async def main() -> None:
        setup = Setup()
        assert [setup.router.close(1), setup.router.close(1), setup.router.close(77)] == [True, False, False]
        await setup.publish((1, 11, GO_ON), (2, 21, GO_ON))
        assert not setup.streams[1].first_token_ns
        assert (await anext(setup.streams[2])).token_ids == [21]

    run_async(main())


def test_waiting_counts_until_first_token_close_or_failure() -> None:
    async def main() -> None:
        setup = Setup()
        assert (setup.router.waiting_requests, setup.router.waiting_tokens) == (2, 30)
        await setup.publish((1, 11, GO_ON))
        await setup.publish((1, 12, GO_ON))
        assert (setup.router.waiting_requests, setup.router.waiting_tokens) == (1, 20)
        setup.router.close(2)
        setup.router.close(1)
        assert (setup.router.waiting_requests, setup.router.waiting_tokens) == (0, 0)

    run_async(main())


def test_lagging_reader_fails_one_token_past_the_bound_and_its_sequence_is_abandoned() -> None:
    async def main() -> None:
        setup = Setup(max_pending_tokens=3)
        for token_id in range(3):
            await setup.publish((1, token_id, GO_ON))
        assert (await anext(setup.streams[1])).token_ids == [0, 1, 2]
        for token_id in range(4):
            await setup.publish((1, token_id, GO_ON), (2, token_id, GO_ON) if token_id < 3 else (9, 0, GO_ON))
        with pytest.raises(SlowConsumerError):
            await anext(setup.streams[1])
        assert setup.abandoned == [1]
        assert (await anext(setup.streams[2])).token_ids == [0, 1, 2]

    run_async(main())


def test_tokens_gather_for_the_interval_but_the_first_the_last_and_those_that_fill_the_bound() -> None:
    """A token every 3 ns, an interval of 7: after the first, the third one on is due each time."""

    async def main() -> None:
        setup = Setup(interval_ns=7)
        stream, batches = setup.streams[1], []

        async def read() -> None:
            batches.extend([batch.token_ids async for batch in stream])

        reading = asyncio.create_task(read())
        for token_id in range(8):
            setup.clock.time_ns += 3
            await setup.publish((1, token_id, LENGTH if token_id == 7 else GO_ON))
            await asyncio.sleep(0)
        await reading
        assert batches == [[0], [1, 2, 3], [4, 5, 6], [7]]

    run_async(main())


def test_an_interval_never_holds_more_than_the_bound() -> None:
    async def main() -> None:
        setup = Setup(max_pending_tokens=2, interval_ns=1000)
        await setup.publish((1, 0, GO_ON))
        assert (await anext(setup.streams[1])).token_ids == [0]
        reading = asyncio.ensure_future(anext(setup.streams[1]))
        await setup.publish((1, 1, GO_ON))
        assert not reading.done()
        await setup.publish((1, 2, GO_ON))
        assert (await reading).token_ids == [1, 2]

    run_async(main())


def test_the_last_tokens_come_before_the_deadline_however_soon_it_follows_them() -> None:
    async def main() -> None:
        setup = Setup()
        reader = asyncio.ensure_future(anext(setup.streams[1]))
        await asyncio.sleep(0)
        setup.router.publish(delta([(1, 11, GO_ON)]))  # both reach the loop before the reader runs again
        setup.router.end([(1, FinishReason.DEADLINE), (2, FinishReason.DEADLINE)])
        assert await reader == TokenBatch([11], [], GO_ON)
        for stream in setup.streams.values():
            with pytest.raises(DeadlineExceededError):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run_async(main())


def test_an_error_and_the_tokens_before_it_do_not_wait_for_the_interval() -> None:
    async def main() -> None:
        setup = Setup(interval_ns=1000)
        stream = setup.streams[1]
        await setup.publish((1, 0, GO_ON))
        await anext(stream)
        await setup.publish((1, 1, GO_ON), (2, 5, GO_ON))
        await setup.publish((1, 2, GO_ON))
        reader = asyncio.ensure_future(anext(stream))
        setup.router.fail(1, ExecutorError("x"))
        assert await reader == TokenBatch([1, 2], [], GO_ON)
        with pytest.raises(ExecutorError):
            await anext(stream)

    run_async(main())


def test_failures_reach_the_reader_as_errors() -> None:
    async def main() -> None:
        setup = Setup()
        setup.router.fail(1, ExecutorError("x"))
        await asyncio.sleep(0)
        with pytest.raises(ExecutorError):
            await anext(setup.streams[1])
        await setup.publish((2, -1, FinishReason.UNSERVICEABLE))
        with pytest.raises(UnserviceableError):
            await anext(setup.streams[2])
        assert setup.router.num_open == 0

    run_async(main())


def test_fail_all_ends_every_stream_and_abandons_its_sequence() -> None:
    async def main() -> None:
        setup = Setup()
        await setup.publish((1, 11, GO_ON))
        setup.router.fail_all(ExecutorError("gone"))
        assert (await anext(setup.streams[1])).token_ids == [11]
        for stream in setup.streams.values():
            with pytest.raises(ExecutorError):
                await anext(stream)
        assert (setup.abandoned, setup.router.num_open, setup.router.waiting_requests) == ([1, 2], 0, 0)

    run_async(main())


def test_stream_tells_when_first_and_last_token_came() -> None:
    async def main() -> None:
        setup = Setup()
        for time_ns, token_id in ((100, 1), (250, 2), (300, 3)):
            setup.clock.time_ns = time_ns
            await setup.publish((1, token_id, GO_ON))
        assert (setup.streams[1].first_token_ns, setup.streams[1].last_token_ns) == (100, 300)

    run_async(main())
