"""How RPCs end whose client has gone, as the servicer sees it."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import pytest
from chairlift.inference.v1 import inference_pb2 as pb
from structlog.testing import CapturingLogger

from service.api import call as call_module
from service.api.call import Call
from service.api.servicers import InferenceServicer
from service.errors import InvalidRequestError
from tests.doubles import request_for, run_async, served_toy


@dataclass
class FailingContext:
    """An RPC to which nothing can be sent, or no message written."""

    error: Exception
    takes_metadata: bool = True
    remaining_s: float | None = None  # once that has failed
    has_failed: bool = False
    aborts: list[object] = field(default_factory=list)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return self.remaining_s if self.has_failed else None

    async def send_initial_metadata(self, metadata: object) -> None:
        if not self.takes_metadata:
            await self.write(metadata)

    async def write(self, message: object) -> None:
        self.has_failed = True
        raise self.error

    async def abort_with_status(self, status: object) -> None:
        self.aborts.append(status)
        raise grpc.aio.AbortError


def lines_of(
    context: FailingContext, monkeypatch: pytest.MonkeyPatch, method: str = "Generate"
) -> list[tuple[str, dict[str, object]]]:
    """What is logged of one request."""
    log = CapturingLogger()
    monkeypatch.setattr(call_module, "log", log)

    async def main() -> None:
        async with served_toy() as served:
            servicer = InferenceServicer(served.frontend)
            request = request_for() if method == "Generate" else pb.GenerateUnaryRequest(request=request_for())
            with suppress(grpc.aio.AbortError, asyncio.CancelledError):
                await getattr(servicer, method)(request, context)
            assert servicer.idle.is_set()

    run_async(main())
    return [(call.args[0], call.kwargs) for call in log.calls]


@pytest.mark.parametrize(
    "error", [grpc.aio.InternalError("a batch has failed"), grpc.aio.UsageError("over"), asyncio.InvalidStateError()]
)
@pytest.mark.parametrize(("remaining_s", "code"), [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")])
@pytest.mark.parametrize(
    ("method", "takes_metadata"), [("Generate", True), ("Generate", False), ("GenerateUnary", False)]
)
def test_client_that_leaves_a_write_behind_is_no_fault(
    error: Exception,
    remaining_s: float | None,
    code: str,
    method: str,
    takes_metadata: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = FailingContext(error, takes_metadata, remaining_s)
    ((event, fields),) = lines_of(context, monkeypatch, method)
    assert (event, fields["code"], fields["prompt_tokens"]) == ("request.finished", code, 3)
    assert context.aborts == []


@pytest.mark.parametrize(("method", "takes_metadata"), [("Generate", True), ("GenerateUnary", False)])
def test_message_that_cannot_be_made_is_a_fault(
    method: str, takes_metadata: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = FailingContext(TypeError("no message"), takes_metadata)
    (fault, _), (event, fields) = lines_of(context, monkeypatch, method)
    assert (fault, event, fields["code"]) == ("request.fault", "request.finished", "INTERNAL")
    assert len(context.aborts) == 1


def raised(error: Exception) -> Exception:
    """With a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_error_that_is_told_has_no_frames_nor_has_any_that_it_came_from() -> None:
    async def main() -> None:
        error, cause, context, deepest = (raised(InvalidRequestError(name, 1, "none")) for name in "abcd")
        error.__cause__, error.__context__, cause.__context__ = cause, context, deepest
        deepest.__context__ = error
        with pytest.raises(grpc.aio.AbortError):
            await Call(FailingContext(ValueError())).abort(error)
        assert [each.__traceback__ for each in (error, cause, context, deepest)] == [None] * 4

    run_async(main())
