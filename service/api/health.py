"""grpc.health.v1: what the server says of itself, to whoever asks or watches."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.api.call import ClientGoneError, delivered

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1.Health. Lives on the event loop's thread.

    The library's own writes to a watcher with a lock held that setting a status needs: one that does not read would
    stop whoever sets. Here `set` waits for nobody, and a watcher that reads late gets the latest status alone.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # set once, with the next change; then there is a new one

    def set(self, name: str, status: int) -> None:
        """Say `status` of the service `name` from now on."""
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(  # noqa: N802 the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service. Ends with NOT_FOUND for one that has none."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> None:
        """Send the status of a service now and when it changes, SERVICE_UNKNOWN while it has none."""
        written = None
        while True:
            changed = self._changed  # before the status is read: what changes during the write is not missed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != written:
                try:
                    await delivered(context.write(health_pb2.HealthCheckResponse(status=status)))
                except ClientGoneError:
                    return
                written = status
            await changed.wait()
