"""An open-loop client: requests go out when they are due, whatever has become of the ones before."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import grpc
import numpy as np
from chairlift.inference.v1 import inference_pb2 as pb
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc

from service.bench.timeline import UNFINISHED, RequestTimeline
from service.sim.arrivals import Arrivals, OnOffArrivals

Metadata = tuple[tuple[str, str], ...]

NUM_CHANNELS: Final = 4
"""Connections that the calls take turns on, so that no limit of streams per connection holds one back."""

CONNECT_TIMEOUT_S: Final = 10.0
"""How long a connection is waited for."""

_PROGRESS_PERIOD_S: Final = 0.2
_CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the clients saw, in the order in which the requests were due."""

    timelines: list[RequestTimeline]
    max_start_lag_s: float  # between when a request was due and when its call was made


def due_times_s(arrivals: Arrivals | None, rate: float, num_requests: int, seed: int) -> list[float]:
    """When each request is due. The last one is due at `num_requests` / `rate`, as in `vllm bench serve`.

    Bursts and silences are not scaled to that: they last as long as they are asked to. Without `arrivals` all are due
    at once. They are drawn from a stream of their own: lengths drawn with the same `seed` do not depend on them.
    """
    if arrivals is None or not num_requests:
        return [0.0] * num_requests
    times_s = list(islice(arrivals.times_s(np.random.default_rng((seed, 1))), num_requests))
    if isinstance(arrivals, OnOffArrivals):
        return times_s
    # Gaps of very bursty arrivals may all be 0, or next to it.
    scale = num_requests / rate / times_s[-1] if times_s[-1] else math.inf
    return [time_s * scale for time_s in times_s] if math.isfinite(scale) else times_s


async def is_reachable(target: str, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """True when a server takes connections at `target`, and says so in time."""
    async with grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS) as channel:
        return await _are_ready([channel], connect_timeout_s)


async def run_load(
    target: str,
    requests: Sequence[pb.GenerateRequest],
    times_s: Sequence[float],
    *,
    metadata: Sequence[Metadata] = (),
    max_seconds: float,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadResult:
    """Send `requests[i]` to `target` when `times_s[i]` (ascending) is due, and wait until all have ended.

    Each goes with `metadata[i]`, if there is any. The clock starts when all connections are made, so that no call waits
    for its own; where a server refuses them, or does not answer in time, calls find out for themselves.

    After `max_seconds` no more are sent, and those that run are cancelled and count as unfinished. `on_progress` is
    told now and then how many have ended and how many run.
    """
    channels = [grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS) for _ in range(NUM_CHANNELS)]
    try:
        await _are_ready(channels, CONNECT_TIMEOUT_S)
        client = _Client([pb_grpc.InferenceServiceStub(channel) for channel in channels])
        reporting = asyncio.create_task(_report(client, on_progress)) if on_progress is not None else None
        try:
            await client.run(requests, times_s, metadata or [()] * len(requests), max_seconds)
        finally:
            if reporting is not None:
                reporting.cancel()
        return LoadResult(client.timelines, client.max_start_lag_s)
    finally:
        for channel in channels:
            await channel.close()


class _Client:
    """Owns the calls of one run. Lives on the event loop's thread."""

    def __init__(self, stubs: Sequence[pb_grpc.InferenceServiceStub]) -> None:
        self.timelines: list[RequestTimeline] = []
        self.max_start_lag_s = 0.0
        self.num_ended = 0
        self._stubs = stubs

    async def run(
        self,
        requests: Sequence[pb.GenerateRequest],
        times_s: Sequence[float],
        metadata: Sequence[Metadata],
        max_seconds: float,
    ) -> None:
        """Send all, wait for all; cancel what runs after `max_seconds`."""
        try:
            async with asyncio.timeout(max_seconds), asyncio.TaskGroup() as calls:
                begin_s = time.monotonic()
                for number, (request, due_s, pairs) in enumerate(zip(requests, times_s, metadata, strict=True)):
                    # Even before a request that is overdue the loop reads the streams that are open.
                    await asyncio.sleep(max(begin_s + due_s - time.monotonic(), 0.0))
                    stub = self._stubs[number % len(self._stubs)]
                    calls.create_task(self._call(stub, request, pairs, begin_s + due_s))
        except TimeoutError:
            pass  # what was to be measured has been

    async def _call(
        self, stub: pb_grpc.InferenceServiceStub, request: pb.GenerateRequest, metadata: Metadata, due_s: float
    ) -> None:
        timeline = RequestTimeline(time.monotonic())
        self.max_start_lag_s = max(self.max_start_lag_s, timeline.start_s - due_s)
        self.timelines.append(timeline)
        try:
            async for response in stub.Generate(request, metadata=metadata):
                event = response.WhichOneof("event")
                if event == "chunk" and response.chunk.token_ids:
                    timeline.chunk_times_s.append(time.monotonic())
                    timeline.chunk_tokens.append(len(response.chunk.token_ids))
                    timeline.output_tokens += len(response.chunk.token_ids)
                elif event == "complete":
                    usage = response.complete.usage
                    timeline.prompt_tokens, timeline.output_tokens = usage.prompt_tokens, usage.completion_tokens
                    timeline.cached_prompt_tokens = usage.cached_prompt_tokens
        except grpc.aio.AioRpcError as error:
            timeline.error, timeline.details = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            timeline.error = UNFINISHED
            raise
        finally:
            timeline.end_s = time.monotonic()
            self.num_ended += 1


async def _are_ready(channels: Sequence[grpc.aio.Channel], timeout_s: float) -> bool:
    """Connect all; False when one is refused, or the time is up."""
    try:
        async with asyncio.timeout(timeout_s):
            return all(await asyncio.gather(*(_is_ready(channel) for channel in channels)))
    except TimeoutError:
        return False


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    """Connect; False when it is refused, which `channel_ready` would wait out."""
    final = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
    while (state := channel.get_state(try_to_connect=True)) not in final:
        await channel.wait_for_state_change(state)
    return state is grpc.ChannelConnectivity.READY


async def _report(client: _Client, on_progress: Callable[[int, int], None]) -> None:
    while True:
        on_progress(client.num_ended, len(client.timelines) - client.num_ended)
        await asyncio.sleep(_PROGRESS_PERIOD_S)
