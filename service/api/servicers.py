"""The gRPC services: one request's way in, and its answer's way out."""

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import TypeVar

import grpc
import structlog
from chairlift.inference.v1 import inference_pb2 as pb
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc
from google.protobuf.message import DecodeError, Message

from service.api.convert import chunk_message, complete_message, logprobs_messages, params_of, prompt_of
from service.api.frontend import Frontend, Generation
from service.api.status import mapping_of, status_of
from service.errors import InvalidRequestError, UnknownModelError

REQUEST_ID_KEY = "x-request-id"
TENANT_KEY = "x-tenant-id"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII: it goes into metadata and logs
_TENANT = re.compile(r"[!-~]{1,64}")
_MAX_SHOWN_CHARS = 128  # of a caller's text in an error: the status travels in metadata, which clients bound

log = structlog.get_logger("chairlift.api")

Request = TypeVar("Request", bound=Message)


class Call:
    """One RPC: its request id, its errors, its log line."""

    def __init__(self, context: "grpc.aio.ServicerContext[object, object]") -> None:
        self._context = context
        self._metadata = dict(context.invocation_metadata() or ())
        given = str(self._metadata.get(REQUEST_ID_KEY, ""))
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self._generation: Generation | None = None
        self._code = grpc.StatusCode.CANCELLED  # until the RPC ends in another way

    @property
    def tenant(self) -> str:
        """Whose the request is: the metadata's `x-tenant-id`, "" without one. Raises InvalidRequestError."""
        if TENANT_KEY not in self._metadata:
            return ""
        tenant = str(self._metadata[TENANT_KEY])
        if not _TENANT.fullmatch(tenant):
            raise InvalidRequestError(TENANT_KEY, tenant[:_MAX_SHOWN_CHARS], "1 to 64 visible ASCII characters")
        return tenant

    @property
    def time_remaining_s(self) -> float | None:
        """Seconds until the RPC's own deadline; None without one."""
        return self._context.time_remaining()

    async def admit(self, generation: Generation) -> None:
        """Send the initial metadata: from here on, no client retries the RPC by itself."""
        self._generation = generation
        await self._context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id),))

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
        fields: dict[str, object] = {"request_id": self.request_id, "code": self._code.name}
        generation = self._generation
        if generation is not None:
            timings = generation.timings
            fields |= {
                "finish_reason": generation.finish_reason.name,
                "prompt_tokens": generation.num_prompt_tokens,
                "completion_tokens": generation.num_completion_tokens,
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
        try:
            with await self._submit(_readable(request), call) as generation:
                await call.admit(generation)
                await context.write(self._started(call, generation))
                async for chunk in generation:
                    await context.write(chunk_message(chunk))
                await context.write(pb.GenerateResponse(complete=complete_message(generation)))
            call.succeed()
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
            message = _readable(request)
            if not message.HasField("request"):
                raise InvalidRequestError("request", None, "required")
            with await self._submit(message.request, call) as generation:
                whole = await generation.collect()
            await call.admit(generation)
            call.succeed()
            return pb.GenerateUnaryResponse(
                request_id=call.request_id,
                model=self._frontend.limits.model_name,
                token_ids=whole.token_ids,
                text=whole.text,
                logprobs=logprobs_messages(whole.logprobs),
                complete=complete_message(generation),
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

    async def _submit(self, request: pb.GenerateRequest, call: Call) -> Generation:
        served = self._frontend.limits.model_name
        if request.model and request.model != served:
            raise UnknownModelError(request.model[:_MAX_SHOWN_CHARS], served)
        prompt, params = prompt_of(request), params_of(request)
        return await self._frontend.submit(prompt, params, call.tenant, call.time_remaining_s)

    def _started(self, call: Call, generation: Generation) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            started=pb.GenerateStarted(
                request_id=call.request_id,
                model=self._frontend.limits.model_name,
                prompt_tokens=generation.num_prompt_tokens,
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


def _reader(kind: type[Request]) -> Callable[[bytes], Request | InvalidRequestError]:
    """A deserializer that returns its error: gRPC answers one that is raised with UNKNOWN, and logs a traceback."""

    def read(raw: bytes) -> Request | InvalidRequestError:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return InvalidRequestError("request", f"{len(raw)} bytes", f"a message {kind.DESCRIPTOR.full_name}")

    return read


def _readable(request: Request | InvalidRequestError) -> Request:
    if isinstance(request, InvalidRequestError):
        raise request
    return request
