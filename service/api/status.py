"""From our errors to gRPC statuses: the one table.

Every status carries google.rpc details: ErrorInfo with a stable `reason` in the domain "chairlift", and by kind
BadRequest, RetryInfo or RequestInfo. An error that is not in the table is a fault of ours: INTERNAL, its text masked.
"""

from dataclasses import dataclass
from typing import NamedTuple

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details  # type: ignore[import-untyped]
from google.rpc import status_pb2
from grpc_status import rpc_status

from service.errors import (
    ChairliftError,
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    SlowConsumerError,
    UnknownModelError,
    UnserviceableError,
)

DOMAIN = "chairlift"
RESTART_RETRY_AFTER_S = 5.0
PUSHBACK_KEY = "grpc-retry-pushback-ms"


class Mapping(NamedTuple):
    """How one class of error is told to the caller."""

    code: grpc.StatusCode
    reason: str


TABLE: dict[type[Exception], Mapping] = {
    InvalidRequestError: Mapping(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    UnknownModelError: Mapping(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    UnserviceableError: Mapping(grpc.StatusCode.FAILED_PRECONDITION, "UNSERVICEABLE"),
    OverloadedError: Mapping(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    SlowConsumerError: Mapping(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER"),
    DeadlineExceededError: Mapping(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    DrainingError: Mapping(grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    EngineDeadError: Mapping(grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD"),
}
INTERNAL = Mapping(grpc.StatusCode.INTERNAL, "INTERNAL")


def mapping_of(error: Exception) -> Mapping:
    """The table's entry for the error's class or its nearest base."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


@dataclass(frozen=True, slots=True)
class ErrorStatus(grpc.Status):
    """What `abort_with_status` takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def status_of(error: Exception, request_id: str) -> ErrorStatus:
    """The status that tells `error` to the caller of `request_id`."""
    code, reason = mapping_of(error)
    is_ours = isinstance(error, ChairliftError) and code is not grpc.StatusCode.INTERNAL
    message = str(error) if is_ours else f"internal error; the server's log has it under request id {request_id}"
    status = status_pb2.Status(code=code.value[0], message=message)
    info = details.ErrorInfo(reason=reason, domain=DOMAIN)
    metadata: list[tuple[str, str | bytes]] = []
    extra: list[Message] = []
    if isinstance(error, InvalidRequestError):
        info.metadata.update({"field": error.field, "value": repr(error.value), "limit": error.limit})
        violation = details.BadRequest.FieldViolation(field=error.field, description=message)
        extra.append(details.BadRequest(field_violations=[violation]))
    elif isinstance(error, UnknownModelError):
        extra.append(details.ResourceInfo(resource_type="model", resource_name=error.model, description=message))
    elif isinstance(error, OverloadedError):
        extra.append(_retry_info(error.retry_after_s))
        metadata.append((PUSHBACK_KEY, str(round(error.retry_after_s * 1000))))
    elif code is grpc.StatusCode.UNAVAILABLE:
        extra.append(_retry_info(RESTART_RETRY_AFTER_S))
    elif code is grpc.StatusCode.INTERNAL:
        extra.append(details.RequestInfo(request_id=request_id))
    for detail in (info, *extra):
        status.details.add().Pack(detail)
    plain = rpc_status.to_status(status)
    return ErrorStatus(plain.code, plain.details, (*plain.trailing_metadata, *metadata))


def _retry_info(retry_after_s: float) -> details.RetryInfo:
    info = details.RetryInfo()
    info.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
    return info
