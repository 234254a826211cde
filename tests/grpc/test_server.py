"""The server's life: port, health, reflection, and its orderly end."""

import asyncio
import struct

import grpc
import pytest
from chairlift.inference.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2 as details
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.api.server import ALIVE, INFERENCE, Server
from service.api.settings import ServerSettings
from service.engine.settings import EngineSettings
from service.errors import ConfigError, ExecutorError
from tests.doubles import (
    PROMPT,
    Connected,
    ManualClock,
    connected_toy,
    eventually,
    request_for,
    run_async,
    toy_output,
)
from tests.grpc.test_errors import details_of, error_of, reason_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def wait_for_health(toy: Connected, service: str, status: int) -> None:
    watch = health_pb2_grpc.HealthStub(toy.channel).Watch(health_pb2.HealthCheckRequest(service=service))
    async for answer in watch:
        if answer.status == status:
            watch.cancel()
            return


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload


async def stalled_watch(port: int) -> asyncio.StreamWriter:
    """A connection with a Watch of the whole server, whose window for the server's messages is 0 bytes."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/grpc.health.v1.Health/Watch",
        b":authority": b"toy",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    headers = b"".join(struct.pack("BB", 0, len(k)) + k + struct.pack("B", len(v)) + v for k, v in fields.items())
    initial_window = struct.pack(">HI", 4, 0)
    no_message = bytes(5)  # uncompressed, of length 0: every field at its default
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, initial_window))
    writer.write(frame(1, 0x4, 1, headers) + frame(0, 0x1, 1, no_message))
    is_answered = False
    while not is_answered:  # until the answer's headers, which no window holds back
        length_and_kind, _, _ = struct.unpack(">IBI", await reader.readexactly(9))
        await reader.readexactly(length_and_kind >> 8)
        is_answered = length_and_kind & 0xFF == 1
    return writer


def test_port_in_use_is_a_config_error_that_names_it() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            with pytest.raises(ConfigError, match=f"127.0.0.1:{toy.port}"):
                Server(ServerSettings(port=toy.port)).bind()

    run_async(main())


def test_host_that_is_no_name_is_a_config_error() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="cannot listen"):
            Server(ServerSettings(host="x" * 64, port=0)).bind()

    run_async(main())


def test_serving_server_is_alive_and_ready() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            assert [await toy.health(name) for name in (ALIVE, INFERENCE)] == [SERVING, SERVING]

    run_async(main())


def test_dead_engine_fails_liveness_and_readiness() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.errors.append(ExecutorError("for good"))
            with pytest.raises(grpc.aio.AioRpcError):
                await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
            await wait_for_health(toy, ALIVE, NOT_SERVING)
            await wait_for_health(toy, INFERENCE, NOT_SERVING)

    run_async(main())


def test_stuck_step_ends_readiness_and_the_streams_that_wait_for_it_until_it_is_over() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with connected_toy(settings=EngineSettings(stuck_after_s=1.0), clock=clock) as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(1)
            call = toy.stub.Generate(request_for(max_tokens=12))
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
            await eventually(lambda: executor.num_arrived == 2)
            clock.time_ns += 2_000_000_000
            for name in (ALIVE, INFERENCE):
                await wait_for_health(toy, name, NOT_SERVING)
            with pytest.raises(grpc.aio.AioRpcError) as open_error:
                await call.read()
            for error in (open_error.value, await error_of(toy, request_for())):
                assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
                assert details_of(error)[details.RetryInfo].retry_delay.ToMilliseconds() > 0
            executor.allow(99)
            for name in (ALIVE, INFERENCE):
                await wait_for_health(toy, name, SERVING)
            answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
            assert list(answer.token_ids) == toy_output(PROMPT, 6)
            assert toy.served.has_all_blocks_free

    run_async(main())


def test_health_watcher_that_does_not_read_keeps_nobody_waiting() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with connected_toy(settings=EngineSettings(stuck_after_s=1.0), clock=clock) as toy:
            watcher = await stalled_watch(toy.port)
            executor = toy.served.executor
            executor.close_gate()
            call = toy.stub.Generate(request_for())
            await eventually(lambda: executor.num_arrived == 1)
            clock.time_ns += 2_000_000_000
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            while await toy.health(ALIVE) != NOT_SERVING:
                pass
            executor.allow(float("inf"))
            while await toy.health(ALIVE) != SERVING:
                pass
            toy.hurry.set()
            await toy.server.drain(toy.hurry)
            watcher.close()

    run_async(main())


def test_watchdog_that_fails_ends_liveness_and_readiness(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.engine.abandon_if_stuck = None  # type: ignore[assignment]  # which the watchdog stumbles over
            for name in (ALIVE, INFERENCE):
                await wait_for_health(toy, name, NOT_SERVING)

    run_async(main())
    assert "server.watch_failed" in capsys.readouterr().out


def test_unknown_service_has_no_health_and_can_be_watched() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await toy.health("other")
            watch = health_pb2_grpc.HealthStub(toy.channel).Watch(health_pb2.HealthCheckRequest(service="other"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            watch.cancel()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run_async(main())


def test_step_that_ends_after_all_does_not_make_a_draining_server_ready() -> None:
    async def main() -> None:
        clock = ManualClock()
        settings, server_settings = EngineSettings(stuck_after_s=1.0), ServerSettings(port=0, drain_delay_s=600.0)
        async with connected_toy(settings=settings, server_settings=server_settings, clock=clock) as toy:
            executor = toy.served.executor
            drain = asyncio.create_task(toy.server.drain(toy.hurry))
            await wait_for_health(toy, INFERENCE, NOT_SERVING)
            watch = health_pb2_grpc.HealthStub(toy.channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
            assert (await watch.read()).status == NOT_SERVING
            change = asyncio.ensure_future(watch.read())
            for num_steps in (1, 2):
                executor.close_gate()
                call = toy.stub.Generate(request_for())
                await eventually(lambda: executor.num_arrived == num_steps)  # noqa: B023
                clock.time_ns += 2_000_000_000
                await wait_for_health(toy, ALIVE, NOT_SERVING)
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
                executor.allow(float("inf"))
                await wait_for_health(toy, ALIVE, SERVING)
            assert not change.done()
            change.cancel()
            toy.hurry.set()
            await drain

    run_async(main())


def test_reflection_lists_the_services() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            stub = reflection_pb2_grpc.ServerReflectionStub(toy.channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = [answer async for answer in stub.ServerReflectionInfo(iter([ask]))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {INFERENCE, "grpc.health.v1.Health"} <= names

    run_async(main())


def test_drain_lets_running_streams_finish_and_ends_readiness_alone() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(1)
            call = toy.stub.Generate(request_for(max_tokens=12))
            events = aiter(call)
            await anext(events)
            first = await anext(events)
            watcher = asyncio.create_task(wait_for_health(toy, INFERENCE, NOT_SERVING))
            await wait_for_health(toy, INFERENCE, SERVING)
            drain = asyncio.create_task(toy.server.drain(toy.hurry))
            await watcher
            assert await toy.health(ALIVE) == SERVING
            executor.allow(99)
            rest = [response async for response in events]
            await drain
            token_ids = [*first.chunk.token_ids, *(i for response in rest for i in response.chunk.token_ids)]
            assert token_ids == toy_output(PROMPT, 12)
            assert rest[-1].HasField("complete")

    run_async(main())


def test_drain_without_streams_does_not_wait_for_health_watchers() -> None:
    async def main() -> None:
        async with connected_toy(server_settings=ServerSettings(port=0, drain_grace_s=600.0)) as toy:
            watch = health_pb2_grpc.HealthStub(toy.channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
            assert (await watch.read()).status == SERVING
            await toy.server.drain(toy.hurry)
            assert (await watch.read()).status == NOT_SERVING

    run_async(main())


def test_engine_that_dies_during_the_drain_fails_liveness() -> None:
    async def main() -> None:
        async with connected_toy(server_settings=ServerSettings(port=0, drain_delay_s=600.0)) as toy:
            drain = asyncio.create_task(toy.server.drain(toy.hurry))
            await wait_for_health(toy, INFERENCE, NOT_SERVING)
            toy.served.executor.errors.append(ExecutorError("for good"))
            with pytest.raises(grpc.aio.AioRpcError):
                await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
            await wait_for_health(toy, ALIVE, NOT_SERVING)
            toy.hurry.set()
            await drain

    run_async(main())


def test_draining_engine_refuses_new_requests_as_unavailable() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.engine.drain()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value)[details.ErrorInfo].reason == "DRAINING"

    run_async(main())


@pytest.mark.parametrize("is_hurried", [False, True])
def test_stream_that_outlasts_the_grace_ends_unavailable(is_hurried: bool) -> None:
    async def main() -> None:
        grace_s = 600.0 if is_hurried else 0.05
        async with connected_toy(server_settings=ServerSettings(port=0, drain_grace_s=grace_s)) as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(1)
            call = toy.stub.Generate(request_for(max_tokens=12))
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
            if is_hurried:
                toy.hurry.set()
            await toy.server.drain(toy.hurry)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value)[details.ErrorInfo].reason == "DRAINING"

    run_async(main())
