"""Several samples for one reader."""

import asyncio

import numpy as np
import pytest

from service.api.generation import Generation
from service.api.params import GenerationParams, TokenPrompt
from service.api.samples import Samples
from service.core.types import FinishReason, TokenLogprobs
from service.engine.stream import TokenStream
from service.errors import DeadlineExceededError
from tests.doubles import PROMPT, Served, eventually, run_async, served_toy, toy_output, toy_text, toy_tokenizer


async def submit(served: Served, count: int) -> Samples:
    params = GenerationParams(max_tokens=6, temperature=0.0, n=count)
    return Samples(await served.frontend.submit_samples(TokenPrompt(PROMPT), params))


async def let_tasks_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_sample_has_ended_with_its_last_chunk_alone_however_slow_the_reader() -> None:
    async def main() -> None:
        token_ids: list[list[int]] = [[], []]
        ended = []
        async with served_toy() as served:
            served.executor.close_gate()
            with await submit(served, 2) as samples:
                served.executor.allow(2)
                async for index, chunk in samples:
                    served.executor.allow(float("inf"))
                    await eventually(lambda: not served.engine.num_open_streams)
                    await let_tasks_run()
                    token_ids[index] += chunk.token_ids
                    if samples.generations[index].has_ended:
                        ended.append((index, len(token_ids[index])))
        assert token_ids == [toy_output(PROMPT, 6)] * 2
        assert sorted(ended) == [(0, 6), (1, 6)]

    run_async(main())


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_stop_string_ends_the_sequence_before_its_last_chunk_is_written(num_samples: int) -> None:
    async def main() -> None:
        stop = toy_text(toy_output(PROMPT, 3)[2:])
        async with served_toy() as served:
            served.executor.close_gate()
            params = GenerationParams(max_tokens=100, temperature=0.0, n=num_samples, stop_strings=[stop])
            with Samples(await served.frontend.submit_samples(TokenPrompt(PROMPT), params)) as samples:
                served.executor.allow(num_samples + 2)  # samples begin one step after the first
                num_ended = 0
                async for index, _ in samples:
                    num_ended += samples.generations[index].has_ended
                    if num_ended == num_samples:
                        assert not served.engine.num_open_streams
                        served.executor.allow(1)
                        await eventually(lambda: served.has_all_blocks_free)

    run_async(main())


@pytest.mark.parametrize("is_whole", [False, True])
def test_logprobs_of_every_sample_end_with_the_token_that_completed_its_stop_string(is_whole: bool) -> None:
    async def main() -> None:
        streams = [TokenStream(seq_id, 1, max_pending_tokens=10) for seq_id in range(4)]
        for stream in streams:
            for token_id in (5, 6, 7, 8):
                entry = TokenLogprobs(-token_id, np.empty(0, np.int32), np.empty(0, np.float32))
                stream.push(token_id, FinishReason.NONE, entry, now_ns=1)
        async with served_toy() as served:
            samples = Samples([Generation(served.engine, stream, toy_tokenizer(), ["w7"], 0) for stream in streams])
            with samples:
                chunks = await samples.collect() if is_whole else [chunk async for _, chunk in samples]
        assert [chunk.token_ids for chunk in chunks] == [[5, 6, 7]] * 4
        assert [[entry.chosen for entry in chunk.logprobs] for chunk in chunks] == [[-5, -6, -7]] * 4
        assert [generation.stop_string for generation in samples.generations] == ["w7"] * 4

    run_async(main())


def test_an_error_comes_after_the_tokens_that_the_other_samples_have() -> None:
    async def main() -> None:
        streams = [TokenStream(seq_id, 1, max_pending_tokens=10) for seq_id in range(3)]
        streams[2].push(5, FinishReason.NONE, None, now_ns=1)
        for stream in streams:
            stream.fail(DeadlineExceededError("over"))
        read = []
        async with served_toy() as served:
            samples = Samples([Generation(served.engine, stream, toy_tokenizer(), [], 0) for stream in streams])
            with samples, pytest.raises(DeadlineExceededError):
                async for index, chunk in samples:
                    read.append((index, chunk.token_ids))
        assert read == [(2, [5])]

    run_async(main())


def test_a_caller_that_stops_waiting_for_all_samples_frees_them() -> None:
    async def main() -> None:
        async with served_toy() as served:
            served.executor.close_gate()
            served.executor.allow(2)

            async def answer() -> None:
                with await submit(served, 4) as samples:
                    await samples.collect()

            task = asyncio.create_task(answer())
            await eventually(lambda: served.executor.num_arrived == 3)
            task.cancel()
            await asyncio.wait({task})
            assert not served.engine.num_open_streams
            served.executor.allow(1)
            await eventually(lambda: served.has_all_blocks_free and not served.scheduler.has_work)
            assert served.executor.num_arrived == 3

    run_async(main())


def test_a_reader_that_stops_leaves_no_task_behind() -> None:
    async def main() -> None:
        async with served_toy() as served:
            served.executor.close_gate()
            served.executor.allow(1)
            before = asyncio.all_tasks()
            with await submit(served, 4) as samples:
                chunks = aiter(samples)
                await anext(chunks)
            await let_tasks_run()
            assert asyncio.all_tasks() == before
            served.executor.allow(1)
            await eventually(lambda: served.has_all_blocks_free and not served.scheduler.has_work)

    run_async(main())
