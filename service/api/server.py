"""The gRPC server: its options, its health, its end."""

import asyncio
import socket
from collections.abc import Coroutine

import grpc
import structlog
from chairlift.inference.v1 import inference_pb2 as pb
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service.api.frontend import Frontend
from service.api.health import HEALTH, NOT_SERVING, SERVING, HealthServicer
from service.api.servicers import InferenceServicer, add_to_server
from service.api.settings import ServerSettings
from service.engine.engine import Engine
from service.errors import ConfigError, DrainingError

INFERENCE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
ALIVE = ""  # the health name of the process itself
MAX_PENDING_RPCS = 1 << 16  # that have arrived and not begun, for the loop was busy
STOP_GRACE_S = 1.0  # for last messages to leave once all streams have ended

log = structlog.get_logger("chairlift.server")


def server_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Channel arguments of the server."""
    return [
        ("grpc.so_reuseport", 0),  # else a second server on the same port would start without an error
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        # From a burst of 1,000 on, the default drops RPCs at random as CANCELLED; the queue's bound says why, and when.
        ("grpc.server.max_pending_requests", MAX_PENDING_RPCS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_RPCS),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # The default of 300 s kills clients that ping during long quiet calls.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.max_connection_age_ms", settings.max_connection_age_s * 1000),
        # Nothing else ends the RPC of a client that does not read: no status reaches it behind the messages it leaves.
        ("grpc.max_connection_age_grace_ms", settings.max_connection_grace_s * 1000),
    ]


class Server:
    """Owns the listening port and the services on it. Lives on the event loop's thread.

    `bind`, then `start` with a warm engine, then `drain`. Health name "" says that loop and engine thread make
    progress, the name of InferenceService that requests are taken. Both come back when a step that was taken for stuck
    ends after all.
    """

    def __init__(self, settings: ServerSettings, *, watch_period_s: float = 1.0) -> None:
        self._settings = settings
        self._watch_period_s = watch_period_s
        self._is_draining = False
        self._server = grpc.aio.server(options=server_options(settings))
        self._health = HealthServicer()
        self._engine: Engine
        self._servicer: InferenceServicer
        self._watch: asyncio.Task[None]

    def bind(self) -> int:
        """Take the port, before the model is loaded. Yields the port. Raises ConfigError when it is in use."""
        host, port = self._settings.host, self._settings.port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            _try_to_bind(host, port)
            return self._server.add_insecure_port(address)
        except (OSError, RuntimeError, UnicodeError) as error:  # the last: a host that is no name
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"cannot listen on {address}: {reason}") from error

    async def start(self, engine: Engine, frontend: Frontend) -> None:
        """Take requests for a ready engine."""
        self._engine = engine
        self._servicer = InferenceServicer(frontend)
        add_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._health.set(ALIVE, SERVING)
        self._health.set(INFERENCE, SERVING)
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_engine())
        self._watch.add_done_callback(self._on_watch_end)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Stop in order: not ready, refuse, let streams finish, end the rest. `hurry` skips what is left of waiting."""
        # Readiness alone: without liveness the pod would be killed with its streams.
        self._is_draining = True
        self._health.set(INFERENCE, NOT_SERVING)
        await _first_of(hurry.wait(), timeout_s=self._settings.drain_delay_s)
        self._engine.drain()
        await _first_of(hurry.wait(), self._servicer.idle.wait(), timeout_s=self._settings.drain_grace_s)
        self._engine.abandon_all(DrainingError("the server is shutting down"))
        # Health watchers never end by themselves, and a client that does not read keeps its RPC in a write.
        await self._server.stop(STOP_GRACE_S)
        self._watch.cancel()

    async def _watch_engine(self) -> None:
        """Keep health true, end readiness with the engine, and let no stream wait for a stuck one."""
        ended = asyncio.create_task(self._engine.wait_ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=self._watch_period_s)
                self._engine.abandon_if_stuck()
                self._health.set(ALIVE, SERVING if self._engine.is_alive else NOT_SERVING)
                is_ready = self._engine.is_alive and not self._is_draining
                self._health.set(INFERENCE, SERVING if is_ready else NOT_SERVING)
            self._health.set(INFERENCE, NOT_SERVING)
        finally:
            ended.cancel()

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        """Nobody watches the engine any more: if that is for a fault of ours, say so, and let the process be ended."""
        error = None if watch.cancelled() else watch.exception()
        if error is not None:
            log.error("server.watch_failed", exc_info=error)
            self._health.set(ALIVE, NOT_SERVING)
            self._health.set(INFERENCE, NOT_SERVING)


def _try_to_bind(host: str, port: int) -> None:
    """Raise OSError when the address cannot be listened on: gRPC would print lines of its own, and not say why."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)


async def _first_of(*events: Coroutine[object, object, object], timeout_s: float) -> None:
    """Wait until one of `events` comes, at most `timeout_s` seconds."""
    tasks = [asyncio.create_task(event) for event in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
