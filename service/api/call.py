"""One RPC, as its servicer sees it: who asks, what it is told, how it ends in the log."""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Sequence

import grpc
import structlog
from chairlift.inference.v1 import inference_pb2 as pb

from service.api.generation import Generation
from service.api.samples import Samples
from service.api.status import mapping_of, status_of
from service.engine.client import TENANT_NAME
from service.errors import InvalidRequestError

REQUEST_ID_KEY = "x-request-id"
TENANT_KEY = "x-tenant-id"
MAX_SHOWN_CHARS = 128
"""Of a caller's text in an error: the status travels in metadata, which clients bound."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into metadata and logs

log = structlog.get_logger("chairlift.api")


class ClientGoneError(Exception):
    """The client has ended the RPC, or its connection has ended, while something was sent to it."""


class Call:
    """One RPC: its request id, its errors, its log line."""

    def __init__(self, context: "grpc.aio.ServicerContext[object, object]") -> None:
        self._context = context
        self._metadata = tuple(context.invocation_metadata() or ())  # a key may occur several times
        given = str(dict(self._metadata).get(REQUEST_ID_KEY, ""))
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self._generations: Sequence[Generation] = ()
        self._code = grpc.StatusCode.CANCELLED  # until the RPC ends in another way

    @property
    def tenant(self) -> str:
        """Whose the request is: the metadata's `x-tenant-id`, "" without one. Raises InvalidRequestError."""
        tenants = [str(value) for key, value in self._metadata if key == TENANT_KEY]
        if len(tenants) > 1:  # the caller's and a proxy's, maybe: nobody can tell which is true
            raise InvalidRequestError(TENANT_KEY, f"{len(tenants)} values", "at most one")
        for tenant in tenants:
            if not TENANT_NAME.fullmatch(tenant):
                raise InvalidRequestError(TENANT_KEY, tenant[:MAX_SHOWN_CHARS], "1 to 64 visible ASCII characters")
        return tenants[0] if tenants else ""

    @property
    def time_remaining_s(self) -> float | None:
        """Seconds until the RPC's own deadline; None without one."""
        return self._context.time_remaining()

    def follow(self, samples: Samples) -> Samples:
        """Tell of `samples` in the log line."""
        self._generations = samples.generations
        return samples

    async def admit(self) -> None:
        """Send the initial metadata: from here on, no client retries the RPC by itself."""
        await delivered(self._context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id),)))

    async def write(self, message: pb.GenerateResponse) -> None:
        """Send a message. Raises ClientGoneError."""
        await delivered(self._context.write(message))

    def succeed(self) -> None:
        """The last message has been written."""
        self._code = grpc.StatusCode.OK

    async def abort(self, error: Exception) -> None:
        """End the RPC with the error's status; always raises. Neither `error` nor what it came from has frames then.

        gRPC keeps what it raises here, in a cycle that only the garbage collector ends, and with the frames it would
        keep the prompt.
        """
        self._code, reason = mapping_of(error)
        if self._code is grpc.StatusCode.INTERNAL:
            log.error("request.fault", request_id=self.request_id, reason=reason, exc_info=error)
        status = status_of(error, self.request_id)
        _forget_frames(error)
        await self._context.abort_with_status(status)

    def log(self) -> None:
        """Write the request's one line."""
        remaining_s = self.time_remaining_s
        if self._code is grpc.StatusCode.CANCELLED and remaining_s is not None and remaining_s <= 0:
            self._code = grpc.StatusCode.DEADLINE_EXCEEDED  # gRPC has told the client, and cancelled this side
        fields: dict[str, object] = {"request_id": self.request_id, "code": self._code.name}
        if self._generations:
            first = self._generations[0]
            timings = max((generation.timings for generation in self._generations), key=lambda each: each.total_ns)
            fields |= {
                "finish_reason": ",".join(generation.finish_reason.name for generation in self._generations),
                "prompt_tokens": first.num_prompt_tokens,
                "cached_prompt_tokens": first.num_cached_prompt_tokens,
                "completion_tokens": sum(generation.num_completion_tokens for generation in self._generations),
                "prepare_ms": round(timings.prepare_ns / 1e6, 3),
                "first_token_ms": round(timings.first_token_ns / 1e6, 3),
                "decode_ms": round(timings.decode_ns / 1e6, 3),
                "total_ms": round(timings.total_ns / 1e6, 3),
            }
        log.info("request.finished", **fields)


async def delivered(sending: Awaitable[None]) -> None:
    """Wait for what is sent. Raises ClientGoneError in place of the several errors that gRPC has for that."""
    try:
        await sending
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise ClientGoneError from error


def _forget_frames(error: BaseException) -> None:
    """Of `error`, and of all that it came from."""
    remaining: list[BaseException | None] = [error]
    while remaining:
        each = remaining.pop()
        if each is not None and each.__traceback__ is not None:  # else it has been here, or was never raised
            each.__traceback__ = None
            remaining += [each.__cause__, each.__context__]
