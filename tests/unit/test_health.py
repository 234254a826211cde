"""What a health watcher is sent."""

import asyncio
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2

from service.api.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthServicer
from tests.doubles import eventually, run_async


@dataclass
class GatedContext:
    """An RPC whose messages are written while the gate is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    is_gone: bool = False

    async def write(self, message: health_pb2.HealthCheckResponse) -> None:
        self.begun.append(message.status)
        await self.gate.wait()
        if self.is_gone:
            raise grpc.aio.InternalError("a batch has failed")
        self.written.append(message.status)


WATCHED = health_pb2.HealthCheckRequest(service="a")


def test_watcher_gets_every_change_once_and_no_other_services() -> None:
    async def main() -> None:
        health, context = HealthServicer(), GatedContext()
        context.gate.set()
        watch = asyncio.create_task(health.Watch(WATCHED, context))
        for status in (SERVING, SERVING, NOT_SERVING, SERVING):
            num_begun = len(context.begun)
            health.set("a", status)
            health.set("b", status)
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(context.begun) <= num_begun + 1
        watch.cancel()
        assert context.written == [SERVING, NOT_SERVING, SERVING]

    run_async(main())


def test_watcher_that_is_late_gets_the_last_status_and_holds_nobody_up() -> None:
    async def main() -> None:
        health, late, reader = HealthServicer(), GatedContext(), GatedContext()
        reader.gate.set()
        watches = [asyncio.create_task(health.Watch(WATCHED, context)) for context in (late, reader)]
        await eventually(lambda: late.begun == [SERVICE_UNKNOWN])
        for num_changes, status in enumerate((SERVING, NOT_SERVING), 1):
            health.set("a", status)
            await eventually(lambda: len(reader.written) == num_changes + 1)  # noqa: B023
            assert (await health.Check(WATCHED, reader)).status == status
        late.gate.set()
        await eventually(lambda: late.written == [SERVICE_UNKNOWN, NOT_SERVING])
        for watch in watches:
            watch.cancel()
        assert reader.written == [SERVICE_UNKNOWN, SERVING, NOT_SERVING]

    run_async(main())


def test_watch_ends_with_its_client() -> None:
    async def main() -> None:
        health, context = HealthServicer(), GatedContext(is_gone=True)
        context.gate.set()
        await health.Watch(WATCHED, context)
        assert context.begun == [SERVICE_UNKNOWN]

    run_async(main())
