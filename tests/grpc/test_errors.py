"""Every error a client can meet, as code and google.rpc details."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from chairlift.inference.v1 import inference_pb2 as pb
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from service.api.server import ALIVE, INFERENCE
from service.engine.settings import EngineSettings
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits
from tests.doubles import LIMITS, PROMPT, Connected, connected_toy, eventually, request_for, run_async, toy_output

SMALL_KV = ExecutorLimits(num_blocks=5, block_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128)
DETAILS = (details.ErrorInfo, details.BadRequest, details.RetryInfo, details.ResourceInfo, details.RequestInfo)


async def error_of(toy: Connected, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in toy.stub.Generate(request):
            pass
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[type[Message], Message]:
    status = rpc_status.from_call(error)
    assert status is not None and status.code == error.code().value[0] and status.message == error.details()
    found = {}
    for packed in status.details:
        kind = next(kind for kind in DETAILS if packed.Is(kind.DESCRIPTOR))
        found[kind] = kind()
        packed.Unpack(found[kind])
    assert found[details.ErrorInfo].domain == "chairlift"
    return found


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return str(details_of(error)[details.ErrorInfo].reason)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", pb.GenerateRequest()),
        ("prompt", pb.GenerateRequest(text="")),
        ("prompt", request_for([])),
        ("prompt", request_for([1000])),
        ("prompt", request_for([1] * 128)),
        ("messages", pb.GenerateRequest(messages=pb.ChatMessages())),
        ("role", pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(content="hi")]))),
        ("max_tokens", request_for(max_tokens=0)),
        ("max_tokens", request_for(max_tokens=126)),
        ("temperature", request_for(temperature=float("nan"))),
        ("top_p", request_for(top_p=0.0)),
        ("stop_strings", request_for(stop_strings=[""])),
    ],
)
def test_bad_field_is_invalid_argument_that_names_field_and_limit(field: str, request_: pb.GenerateRequest) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            error = await error_of(toy, request_)
            assert not toy.served.engine.num_open_streams
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        found = details_of(error)
        assert [violation.field for violation in found[details.BadRequest].field_violations] == [field]
        assert found[details.ErrorInfo].reason == "INVALID_REQUEST"
        assert set(found[details.ErrorInfo].metadata) == {"field", "value", "limit"}
        assert found[details.ErrorInfo].metadata["limit"] in error.details()

    run_async(main())


SERVICE = "/chairlift.inference.v1.InferenceService"
TAKES = "GenerateUnary takes a GenerateUnaryRequest, whose field `request` is a GenerateRequest"


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        ("request", pb.GenerateUnaryRequest()),
        ("request", request_for()),  # token ids: field 2, which a GenerateUnaryRequest does not have
        ("request", pb.GenerateRequest(text="The quick brown fox")),  # read as a message, ends within a field
        ("prompt", pb.GenerateRequest(text="Hi")),  # read as a message, is field 9 with the value 105
        ("prompt", pb.GenerateUnaryRequest(request=pb.GenerateRequest())),
    ],
)
def test_unary_says_what_it_takes_when_it_is_sent_something_else(field: str, sent: Message) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await toy.channel.unary_unary(f"{SERVICE}/GenerateUnary")(sent.SerializeToString())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(caught.value)[details.BadRequest].field_violations[0].field == field
        assert str(caught.value.details()).endswith(TAKES)

    run_async(main())


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [([1] * 12_345, "12345 tokens"), ([1] * 776 + [1000], "1000"), ([1] * 4999 + [1000], "1000")],
    ids=["longer than the context", "checked on the loop", "checked on a thread"],
)
@pytest.mark.usefixtures("no_garbage_collection")
def test_prompt_of_a_refused_request_is_not_kept_for_the_garbage_collector(
    method: str, token_ids: list[int], complaint: str
) -> None:
    assert gc.is_tracked(pb.GenerateRequest())  # else it would not be found below
    request = request_for(token_ids)
    sent = (request if method == "Generate" else pb.GenerateUnaryRequest(request=request)).SerializeToString()
    del request

    async def main() -> None:
        async with connected_toy(replace(LIMITS, max_model_len=10_000)) as toy:
            with pytest.raises(grpc.aio.AioRpcError, match=complaint):
                if method == "Generate":
                    await toy.channel.unary_stream(f"{SERVICE}/Generate")(sent).read()
                else:
                    await toy.channel.unary_unary(f"{SERVICE}/GenerateUnary")(sent)

    run_async(main())
    requests = [each for each in gc.get_objects() if type(each) is pb.GenerateRequest]
    assert [] == [each for each in requests if len(each.token_ids.ids) == len(token_ids)]


@pytest.mark.parametrize(
    ("method", "limit"), [("Generate", "a message chairlift.inference.v1.GenerateRequest"), ("GenerateUnary", TAKES)]
)
def test_bytes_that_are_no_request_are_invalid_argument(method: str, limit: str) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            path = f"{SERVICE}/{method}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if method == "Generate":
                    await toy.channel.unary_stream(path)(b"\xff\xff\xff").read()
                else:
                    await toy.channel.unary_unary(path)(b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        metadata = dict(details_of(caught.value)[details.ErrorInfo].metadata)
        assert metadata == {"field": "request", "value": "'3 bytes'", "limit": limit}

    run_async(main())


def test_every_rpc_of_the_service_is_served() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            for name in pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await toy.channel.unary_unary(f"{SERVICE}/{name}")(b"\xff")
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_async(main())


def test_unknown_model_is_not_found() -> None:
    async def main() -> None:
        request = request_for()
        request.model = "other"
        async with connected_toy() as toy:
            error = await error_of(toy, request)
            request.model = "toy"
            answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert details_of(error)[details.ResourceInfo].resource_name == "other"
        assert answer.model == "toy"

    run_async(main())


def test_long_name_of_an_unknown_model_fits_the_metadata() -> None:
    async def main() -> None:
        request = request_for()
        request.model = "ü" * 100_000
        async with connected_toy() as toy:
            error = await error_of(toy, request)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")

    run_async(main())


def test_request_larger_than_the_kv_buffer_is_failed_precondition() -> None:
    """Four blocks of four: 3 + 14 - 1 token positions fit, one more does not."""

    async def main() -> None:
        async with connected_toy(SMALL_KV) as toy:
            fits = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for(max_tokens=14)))
            error = await error_of(toy, request_for(max_tokens=15))
            assert toy.served.scheduler.counters.totals.num_submitted == 1
        assert list(fits.token_ids) == toy_output(PROMPT, 14)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "UNSERVICEABLE")

    run_async(main())


def test_unset_max_tokens_fills_a_kv_buffer_that_is_smaller_than_the_context() -> None:
    async def main() -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(ignore_eos=True))
        async with connected_toy(SMALL_KV) as toy:
            answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
        assert len(answer.token_ids) == 14
        assert answer.complete.finish_reason == pb.FINISH_REASON_LENGTH

    run_async(main())


def test_full_queue_is_resource_exhausted_before_any_metadata_with_a_delay_for_the_retry() -> None:
    async def main() -> None:
        async with connected_toy(settings=EngineSettings(max_waiting_requests=2)) as toy:
            toy.served.executor.close_gate()
            waiting = [toy.stub.Generate(request_for()) for _ in range(2)]
            await eventually(lambda: toy.served.engine.num_open_streams == 2)
            call = toy.stub.Generate(request_for())
            error = await error_of(toy, request_for())
            assert "x-request-id" not in dict(await call.initial_metadata() or ())
            for name in (ALIVE, INFERENCE):  # a full queue is no reason to take the server out, or to restart it
                assert await toy.health(name) == health_pb2.HealthCheckResponse.SERVING
            toy.served.executor.allow(99)
            assert len([response async for response in waiting[0]]) >= 3
            await eventually(lambda: toy.served.engine.num_open_streams == 0)
            again = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        delay_ms = details_of(error)[details.RetryInfo].retry_delay.ToMilliseconds()
        assert delay_ms > 0
        assert abs(int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) - delay_ms) <= 1
        assert list(again.token_ids) == toy_output(PROMPT, 6)

    run_async(main())


def test_queue_is_bounded_by_prompt_tokens_too_but_never_refuses_all() -> None:
    async def main() -> None:
        async with connected_toy(settings=EngineSettings(max_waiting_tokens=4)) as toy:
            toy.served.executor.close_gate()
            first = toy.stub.Generate(request_for([1, 2, 3, 4, 5]))
            await eventually(lambda: toy.served.engine.num_open_streams == 1)
            error = await error_of(toy, request_for([1]))
            first.cancel()
        assert reason_of(error) == "QUEUE_FULL"

    run_async(main())


def test_transient_error_is_retried_and_the_tokens_are_the_same() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.errors += [ExecutorError("passing", is_transient=True)] * 3
            answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
        assert list(answer.token_ids) == toy_output(PROMPT, 6)

    run_async(main())


def test_retries_count_only_in_a_row() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            passing = [ExecutorError("passing", is_transient=True)] * 3
            for _ in range(2):
                toy.served.executor.errors += passing
                await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
            assert toy.served.executor.errors == []

    run_async(main())


@pytest.mark.parametrize(
    "errors",
    [
        [ExecutorError("passing", is_transient=True)] * 4,
        [ExecutorError("for good")],
        [ValueError("a fault of ours")],
    ],
    ids=["too many transient ones", "a lasting one", "a bug"],
)
def test_dead_engine_is_unavailable_for_open_and_for_new_requests(errors: list[Exception]) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(1)
            call = toy.stub.Generate(request_for())
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
            executor.errors += errors
            executor.allow(99)
            with pytest.raises(grpc.aio.AioRpcError) as open_error:
                while await call.read() is not grpc.aio.EOF:
                    pass
            new_error = await error_of(toy, request_for())
        for error in (open_error.value, new_error):
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
            assert details_of(error)[details.RetryInfo].retry_delay.ToMilliseconds() > 0
        assert executor.is_closed

    run_async(main())


def test_fault_of_ours_is_internal_and_says_nothing_but_the_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            # A limit that no real model has makes the front side stumble.
            toy.served.frontend.limits = None  # type: ignore[assignment]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                request = pb.GenerateUnaryRequest(request=request_for())
                await toy.stub.GenerateUnary(request, metadata=(("x-request-id", "mine-8"),))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "mine-8" in caught.value.details() and "NoneType" not in caught.value.details()
        assert details_of(caught.value)[details.RequestInfo].request_id == "mine-8"
        assert reason_of(caught.value) == "INTERNAL"

    run_async(main())
    assert "mine-8" in capsys.readouterr().out


def test_request_that_fails_in_the_engine_is_internal_and_the_next_one_is_answered() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.failing_seq_ids = [1]
            error = await error_of(toy, request_for())
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            assert "x-request-id" not in dict(error.initial_metadata())  # it was never admitted
            answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
        assert answer.token_ids == toy_output(PROMPT, 6)

    run_async(main())


def test_limits_of_the_toy_model_are_what_these_tests_assume() -> None:
    assert (LIMITS.max_model_len, LIMITS.num_blocks, LIMITS.block_size) == (128, 65, 4)
