"""Several samples for one reader."""

import asyncio

from service.api.params import GenerationParams, TokenPrompt
from service.api.samples import Samples
from tests.doubles import PROMPT, Served, eventually, run_async, served_toy, toy_output


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
