"""Several generations from one prompt, for one reader."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from service.api.generation import Generation, TextChunk


class Samples:
    """The samples of one request, one or more. Used as a context: leaving it frees their sequences."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        """In the order of their index."""
        self.generations = generations
        self._reads: dict[asyncio.Task[TextChunk], int] = {}  # one for each sample whose next chunk is awaited

    def __enter__(self) -> "Samples":
        """The samples themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every sequence that still runs, and every read."""
        for read in self._reads:
            read.cancel()
        for generation in self.generations:
            generation.close()

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextChunk]]:
        """Chunks as they come, each with the index of its sample. Raises the first error that ends one of them.

        Until the next one is asked for, the sample's generation is as its chunk left it: `has_ended` is true with the
        last chunk only.
        """
        if len(self.generations) == 1:
            async for chunk in self.generations[0]:
                yield 0, chunk
            return
        for index in range(len(self.generations)):
            self._read_next(index)
        while self._reads:
            await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            # Errors go last: they end the others too, which get the tokens that they have.
            for read in sorted(filter(asyncio.Task.done, self._reads), key=_has_failed):
                index = self._reads.pop(read)
                yield index, read.result()
                if not self.generations[index].has_ended:
                    self._read_next(index)

    async def collect(self) -> list[TextChunk]:
        """Everything, in one chunk for each sample. Raises the first error that ends one of them."""
        if len(self.generations) == 1:
            return [await self.generations[0].collect()]
        tasks = [asyncio.create_task(generation.collect()) for generation in self.generations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _read_next(self, index: int) -> None:
        self._reads[asyncio.create_task(self.generations[index].__anext__())] = index


def _has_failed(read: asyncio.Task[TextChunk]) -> bool:
    return read.exception() is not None
