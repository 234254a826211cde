"""The gRPC services: one request's way in, and its answer's way out."""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import structlog
from chairlift.inference.v1 import inference_pb2 as pb
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc
from google.protobuf.message import DecodeError, Message

from service.api.convert import PROMPT_LIMIT, chunk_message, complete_message, params_of, prompt_of, sample_message
from service.api.frontend import Frontend, Generation
from service.api.samples import Samples
from service.api.status import mapping_of, status_of
from service.engine.client import TENANT_NAME
from service.errors import InvalidRequestError, UnknownModelError

REQUEST_ID_KEY = "x-request-id"
TENANT_KEY = "x-tenant-id"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into metadata and logs
_UNARY_LIMIT = "GenerateUnary takes a GenerateUnaryRequest, whose field `request` is a GenerateRequest"
_MAX_SHOWN_CHARS = 128  # of a caller's text in an error: the status travels in metadata, which clients bound

log = structlog.get_logger("chairlift.api")

Request = TypeVar("Request", bound=Message)


class _ClientGoneError(Exception):
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
                raise InvalidRequestError(TENANT_KEY, tenant[:_MAX_SHOWN_CHARS], "1 to 64 visible ASCII characters")
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
        await _delivered(self._context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id),)))

    async def write(self, message: pb.GenerateResponse) -> None:
        """Send a message. Raises _ClientGoneError."""
        await _delivered(self._context.write(message))

    def succeed(self) -> None:
        """The last message has been written."""
        self._code = grpc.StatusCode.OK

    async def abort(self, error: Exception) -> None:
        """End the RPC with the error's status; always raises."""
        self._code, reason = mapping_of(error)
        if self._code is grpc.StatusCode.INTERNAL:
            log.error("request.fault", request_id=self.request_id, reason=reason, exc_info=error)
        await self._context.abort_with_status(status_of(error, self.request_id))

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


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """chairlift.inference.v1.InferenceService. Lives on the event loop's thread."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._num_active = 0
        self.idle = asyncio.Event()  # set while no RPC is being answered
        self.idle.set()

    async def Generate(  # noqa: N802 the RPC's name
        self, request: pb.GenerateRequest | InvalidRequestError, context: "grpc.aio.ServicerContext[object, object]"
    ) -> None:
        """Stream one generation. However the RPC ends, leaving the generation's context frees its blocks."""
        call = self._begin(context)
        is_admitted = False
        try:
            with await self._submit(_readable(request), call) as samples:
                async for index, chunk in samples:
                    if not is_admitted:  # till now it could be refused, and a client may try that again
                        is_admitted = True
                        await call.admit()
                        await call.write(self._started(call, samples))
                    await call.write(chunk_message(chunk, index))
                    if samples.generations[index].has_ended:
                        complete = complete_message(samples.generations[index], index)
                        await call.write(pb.GenerateResponse(complete=complete))
            call.succeed()
        except _ClientGoneError:
            pass  # nobody is left to be told; the log says CANCELLED
        except Exception as error:
            await call.abort(error)
        finally:
            self._end(call)

    async def GenerateUnary(  # noqa: N802 the RPC's name
        self,
        request: pb.GenerateUnaryRequest | InvalidRequestError,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> pb.GenerateUnaryResponse:
        """Answer one generation at once."""
        call = self._begin(context)
        try:
            with await self._submit(_inner(_readable(request)), call) as samples:
                wholes = await samples.collect()
            await call.admit()
            call.succeed()
            first, *others = (
                sample_message(generation, whole, index)
                for index, (generation, whole) in enumerate(zip(samples.generations, wholes, strict=True))
            )
            return pb.GenerateUnaryResponse(
                request_id=call.request_id,
                model=self._frontend.limits.model_name,
                token_ids=first.token_ids,
                text=first.text,
                logprobs=first.logprobs,
                complete=first.complete,
                other_samples=others,
            )
        except Exception as error:
            await call.abort(error)
            raise
        finally:
            self._end(call)

    def _begin(self, context: "grpc.aio.ServicerContext[object, object]") -> Call:
        self._num_active += 1
        self.idle.clear()
        return Call(context)

    def _end(self, call: Call) -> None:
        call.log()
        self._num_active -= 1
        if not self._num_active:
            self.idle.set()

    async def _submit(self, request: pb.GenerateRequest, call: Call) -> Samples:
        served = self._frontend.limits.model_name
        if request.model and request.model != served:
            raise UnknownModelError(request.model[:_MAX_SHOWN_CHARS], served)
        prompt, params = prompt_of(request), params_of(request)
        generations = await self._frontend.submit_samples(prompt, params, call.tenant, call.time_remaining_s)
        return call.follow(Samples(generations))

    def _started(self, call: Call, samples: Samples) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            started=pb.GenerateStarted(
                request_id=call.request_id,
                model=self._frontend.limits.model_name,
                prompt_tokens=samples.generations[0].num_prompt_tokens,
            )
        )


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """What the generated code does too, but bytes that are no request reach the servicer as the error they are."""
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate,
            request_deserializer=_reader(pb.GenerateRequest),
            response_serializer=pb.GenerateResponse.SerializeToString,
        ),
        "GenerateUnary": grpc.unary_unary_rpc_method_handler(
            servicer.GenerateUnary,
            request_deserializer=_reader(pb.GenerateUnaryRequest),
            response_serializer=pb.GenerateUnaryResponse.SerializeToString,
        ),
    }
    name = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


async def _delivered(sending: Awaitable[None]) -> None:
    """Wait for what is sent. Raises _ClientGoneError in place of the several errors that gRPC has for that."""
    try:
        await sending
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise _ClientGoneError from error


def _reader(kind: type[Request]) -> Callable[[bytes], Request | InvalidRequestError]:
    """A deserializer that returns its error: gRPC answers one that is raised with UNKNOWN, and logs a traceback."""

    def read(raw: bytes) -> Request | InvalidRequestError:
        try:
            return kind.FromString(raw)
        except DecodeError:
            limit = _UNARY_LIMIT if kind is pb.GenerateUnaryRequest else f"a message {kind.DESCRIPTOR.full_name}"
            return InvalidRequestError("request", f"{len(raw)} bytes", limit)

    return read


def _readable(request: Request | InvalidRequestError) -> Request:
    if isinstance(request, InvalidRequestError):
        raise request
    return request


def _inner(message: pb.GenerateUnaryRequest) -> pb.GenerateRequest:
    """The generation that is asked for. A bare GenerateRequest, sent by mistake, looks as if it had none or no prompt:
    its own prompt is in the field that the generation is expected in. Raises InvalidRequestError.
    """
    if not message.HasField("request"):
        raise InvalidRequestError("request", None, _UNARY_LIMIT)
    if message.request.WhichOneof("prompt") is None:
        raise InvalidRequestError("prompt", None, f"{PROMPT_LIMIT}; {_UNARY_LIMIT}")
    return message.request
