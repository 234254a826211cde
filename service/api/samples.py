"""Several generations from one prompt, for one reader."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from service.api.frontend import Generation, TextChunk


class Samples:
    """The samples of one request, one or more. Used as a context: leaving it frees their sequences."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        """In the order of their index."""
        self.generations = generations

    def __enter__(self) -> "Samples":
        """The samples themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every sequence that still runs."""
        for generation in self.generations:
            generation.close()

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextChunk]]:
        """Chunks as they come, each with the index of its sample. Raises the first error that ends one of them."""
        if len(self.generations) == 1:
            async for chunk in self.generations[0]:
                yield 0, chunk
            return
        reading = {self._next(index): index for index in range(len(self.generations))}
        try:
            while reading:
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in reading if task.done()]:
                    index = reading.pop(task)
                    generation, chunk = self.generations[index], task.result()
                    if generation.has_ended:
                        generation.close()  # it may have ended with a stop string, which the engine knows nothing of
                    else:
                        reading[self._next(index)] = index
                    yield index, chunk
        finally:
            for task in reading:
                task.cancel()

    async def collect(self) -> list[TextChunk]:
        """Everything, in one chunk for each sample. Raises the first error that ends one of them."""
        if len(self.generations) == 1:
            return [await self.generations[0].collect()]
        tasks = [asyncio.create_task(_collect(generation)) for generation in self.generations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _next(self, index: int) -> "asyncio.Task[TextChunk]":
        return asyncio.create_task(self.generations[index].__anext__())


async def _collect(generation: Generation) -> TextChunk:
    whole = await generation.collect()
    generation.close()
    return whole
