"""The gRPC services: one request's way in, and its answer's way out."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import grpc
from chairlift.inference.v1 import inference_pb2 as pb
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc
from google.protobuf.message import DecodeError, Message

from service.api.call import MAX_SHOWN_CHARS, Call, ClientGoneError
from service.api.convert import PROMPT_LIMIT, chunk_message, complete_message, params_of, prompt_of, sample_message
from service.api.frontend import Frontend
from service.api.samples import Samples
from service.errors import InvalidRequestError, UnknownModelError

_UNARY_LIMIT = "GenerateUnary takes a GenerateUnaryRequest, whose field `request` is a GenerateRequest"

Request = TypeVar("Request", bound=Message)


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
        except ClientGoneError:
            pass  # nobody is left to be told; the log says CANCELLED
        except Exception as error:
            await call.abort(error)
        finally:
            del request  # see Call.abort
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
        except ClientGoneError:
            raise asyncio.CancelledError from None  # which is how gRPC itself ends the RPC of a client that has gone
        except Exception as error:
            await call.abort(error)
            raise
        finally:
            del request  # see Call.abort
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
            raise UnknownModelError(request.model[:MAX_SHOWN_CHARS], served)
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
