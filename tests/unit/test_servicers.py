"""How RPCs end whose client has gone, as the servicer sees it."""

from dataclasses import dataclass, field

import grpc
import pytest
from structlog.testing import CapturingLogger

from service.api import servicers
from service.api.servicers import InferenceServicer
from tests.doubles import request_for, run_async, served_toy


@dataclass
class DeafContext:
    """An RPC whose client leaves while a message is being written to it."""

    remaining_s: float | None = None
    aborts: list[object] = field(default_factory=list)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return self.remaining_s

    def cancelled(self) -> bool:
        return True

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: object) -> None:
        raise RuntimeError("the batch has failed")

    async def abort_with_status(self, status: object) -> None:
        self.aborts.append(status)
        raise grpc.aio.AbortError


@pytest.mark.parametrize(("remaining_s", "code"), [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")])
def test_client_that_leaves_a_write_behind_is_no_fault(
    remaining_s: float | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(servicers, "log", log)

    async def main() -> None:
        context = DeafContext(remaining_s)
        async with served_toy() as served:
            servicer = InferenceServicer(served.frontend)
            request = request_for()
            await servicer.Generate(request, context)  # type: ignore[arg-type]
            assert servicer.idle.is_set()
        assert [(call.args, call.kwargs["code"]) for call in log.calls] == [(("request.finished",), code)]
        assert context.aborts == []

    run_async(main())
