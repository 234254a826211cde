"""How RPCs end whose client has gone, as the servicer sees it."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import pytest
from structlog.testing import CapturingLogger

from service.api import call as call_module
from service.api.servicers import InferenceServicer
from tests.doubles import request_for, run_async, served_toy


@dataclass
class FailingContext:
    """An RPC to which no message can be written."""

    error: Exception
    remaining_s: float | None = None  # once a write has failed
    has_failed: bool = False
    aborts: list[object] = field(default_factory=list)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return self.remaining_s if self.has_failed else None

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: object) -> None:
        self.has_failed = True
        raise self.error

    async def abort_with_status(self, status: object) -> None:
        self.aborts.append(status)
        raise grpc.aio.AbortError


def lines_of(context: FailingContext, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    """What is logged of one request."""
    log = CapturingLogger()
    monkeypatch.setattr(call_module, "log", log)

    async def main() -> None:
        async with served_toy() as served:
            servicer = InferenceServicer(served.frontend)
            with suppress(grpc.aio.AbortError):
                await servicer.Generate(request_for(), context)  # type: ignore[arg-type]
            assert servicer.idle.is_set()

    run_async(main())
    return [(call.args[0], call.kwargs) for call in log.calls]


@pytest.mark.parametrize(
    "error", [grpc.aio.InternalError("a batch has failed"), grpc.aio.UsageError("over"), asyncio.InvalidStateError()]
)
@pytest.mark.parametrize(("remaining_s", "code"), [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")])
def test_client_that_leaves_a_write_behind_is_no_fault(
    error: Exception, remaining_s: float | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = FailingContext(error, remaining_s)
    ((event, fields),) = lines_of(context, monkeypatch)
    assert (event, fields["code"], fields["prompt_tokens"]) == ("request.finished", code, 3)
    assert context.aborts == []


def test_message_that_cannot_be_made_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    context = FailingContext(TypeError("no message"))
    (fault, _), (event, fields) = lines_of(context, monkeypatch)
    assert (fault, event, fields["code"]) == ("request.fault", "request.finished", "INTERNAL")
    assert len(context.aborts) == 1
