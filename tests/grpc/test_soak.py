"""A server that answers many unique requests: memory stays flat, and every block is free in the end."""

import asyncio
import gc
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc

from service.engine.scheduling import SchedulingSettings
from tests.doubles import LIMITS, VOCAB_SIZE, Served, connected_toy, eventually, request_for, toy_output

NUM_TENTHS = 10
TENTH = 1_200  # requests
NUM_CLIENTS = 24
SOAK_S = 300.0


class Memory(NamedTuple):
    """Of this process, in which server and clients run."""

    num_objects: int  # blocks of Python's own allocator: those of all objects up to 512 bytes
    resident_bytes: int

    @classmethod
    def in_use(cls) -> "Memory":
        gc.collect()
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(sys.getallocatedblocks(), num_pages * resource.getpagesize())


class Clients:
    """Ask in turns, every time with a prompt of its own; one answer of eight is left after its first message."""

    def __init__(self, stub: pb_grpc.InferenceServiceStub) -> None:
        self._stub = stub
        self._rng = np.random.default_rng(46)
        self._num_asked = 0

    async def ask(self, num_requests: int) -> None:
        """So many requests, `NUM_CLIENTS` at a time."""
        last = self._num_asked + num_requests
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(self._ask_until(last))

    async def _ask_until(self, last: int) -> None:
        while self._num_asked < last:
            self._num_asked += 1
            await self._ask_one(self._num_asked)

    async def _ask_one(self, number: int) -> None:
        # The first two tokens are the request's number: no two prompts begin with the same block.
        tail = self._rng.integers(0, VOCAB_SIZE, int(self._rng.integers(12))).tolist()
        prompt, num_tokens = [*divmod(number, VOCAB_SIZE), *tail], 1 + number % 8
        request = request_for(prompt, max_tokens=num_tokens, ignore_eos=True)
        call = self._stub.Generate(request, metadata=(("x-tenant-id", f"tenant-{number % 7}"),))
        if number % 8 == 7:  # the longest ones
            await call.read()
            call.cancel()
            return
        token_ids = [token_id async for response in call for token_id in response.chunk.token_ids]
        assert token_ids == toy_output(prompt, num_tokens)


async def become_idle(served: Served, num_requests: int) -> None:
    """Wait until all of them have ended in the scheduler, those that were left too."""
    await eventually(lambda: served.scheduler.counters.totals.num_finished == num_requests)


@pytest.mark.slow
def test_twelve_thousand_unique_requests_leave_memory_flat_and_all_blocks_free() -> None:
    """Between the ends of the first tenth and of the last are 10,800 requests: if one in ten left an object behind,
    or each left a page's eighth, the bounds would be broken.
    """
    limits = replace(LIMITS, num_blocks=25)  # less than the batch may need: sequences are preempted too

    async def main() -> list[Memory]:
        used = []
        async with connected_toy(limits, scheduling=SchedulingSettings(policy="fair")) as toy:
            clients = Clients(toy.stub)
            for number in range(1, NUM_TENTHS + 1):
                await clients.ask(TENTH)
                await become_idle(toy.served, number * TENTH)
                used.append(Memory.in_use())
            counters = toy.served.scheduler.counters
            assert counters.num_free_blocks == limits.num_blocks - 1
        return used

    used = asyncio.run(asyncio.wait_for(main(), SOAK_S))
    num_requests = (NUM_TENTHS - 1) * TENTH
    assert used[-1].num_objects - used[0].num_objects < num_requests // 10
    assert used[-1].resident_bytes - used[0].resident_bytes < num_requests * 512
