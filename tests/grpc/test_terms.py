"""Deadlines, priorities and tenants, as a client sends them."""

import grpc
import pytest
from chairlift.inference.v1 import inference_pb2 as pb
from google.protobuf.duration_pb2 import Duration

from service.engine.scheduling import SchedulingSettings
from service.engine.settings import EngineSettings
from tests.doubles import (
    DEADLINE_S,
    PROMPT,
    Connected,
    ManualClock,
    connected_toy,
    eventually,
    request_for,
    run_async,
    toy_output,
)
from tests.grpc.test_errors import error_of, reason_of


def request_within(timeout_s: float, **sampling: object) -> pb.GenerateRequest:
    request = request_for(**sampling)
    request.timeout.FromNanoseconds(round(timeout_s * 1e9))
    return request


async def has_ended(toy: Connected) -> None:
    await eventually(lambda: not toy.served.scheduler.has_work)
    assert toy.served.has_all_blocks_free


def test_a_timeout_ends_the_answer_with_deadline_exceeded() -> None:
    """The gate holds the first step until the time has passed."""

    async def main() -> None:
        clock = ManualClock()
        async with connected_toy(clock=clock) as toy:
            executor, scheduler = toy.served.executor, toy.served.scheduler
            executor.close_gate()
            stream = toy.stub.Generate(request_within(0.2))
            await eventually(lambda: scheduler.counters.num_running == 1)
            clock.time_ns += 200_000_000
            executor.allow(1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    await stream.read()
            assert (caught.value.code(), reason_of(caught.value)) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE_EXCEEDED",
            )
            await has_ended(toy)

    run_async(main())


def test_tokens_that_gather_when_a_deadline_passes_reach_the_client() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with connected_toy(settings=EngineSettings(stream_interval_ms=1000.0), clock=clock) as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(1)
            stream = toy.stub.Generate(request_within(0.2))
            responses = [await stream.read() for _ in range(2)]
            await eventually(lambda: executor.num_arrived == 2)
            clock.time_ns += 200_000_000
            executor.allow(1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    responses.append(await stream.read())
        assert reason_of(caught.value) == "DEADLINE_EXCEEDED"
        token_ids = [token_id for response in responses for token_id in response.chunk.token_ids]
        assert token_ids == toy_output(PROMPT, 2)

    run_async(main())


def test_a_timeout_that_is_long_enough_changes_nothing() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            request = pb.GenerateUnaryRequest(request=request_within(60.0))
            answer = await toy.stub.GenerateUnary(request, timeout=50.0)
        assert list(answer.token_ids) == toy_output(PROMPT, 6)

    run_async(main())


def test_the_deadline_of_the_call_reaches_the_scheduler() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with connected_toy(clock=clock) as toy:
            toy.served.executor.close_gate()
            scheduler = toy.served.scheduler
            call = toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_within(60.0)), timeout=50.0)
            await eventually(lambda: scheduler.counters.num_running == 1)
            (sequence,) = scheduler._live.by_id.values()
            left_ns = sequence.request.deadline_ns - clock.time_ns
            # The request's own would be 60 s to the nanosecond; the call's has been running for less than the test may.
            assert (50 - DEADLINE_S) * 1e9 < left_ns < 55e9
            call.cancel()

    run_async(main())


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("priority", pb.GenerateRequest(text="w1", priority=11)),
        ("priority", pb.GenerateRequest(text="w1", priority=-11)),
        ("timeout", pb.GenerateRequest(text="w1", timeout=Duration(seconds=-1))),
        ("timeout", pb.GenerateRequest(text="w1", timeout=Duration(seconds=86_401))),
    ],
)
def test_terms_out_of_range_are_invalid(field: str, request_: pb.GenerateRequest) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            error = await error_of(toy, request_)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(field)

    run_async(main())


@pytest.mark.parametrize(("tenant", "is_taken"), [("t" * 64, True), ("t" * 65, False), ("", False), ("a b", False)])
def test_a_tenant_is_named_in_the_metadata(tenant: str, is_taken: bool) -> None:
    async def main() -> None:
        async with connected_toy(scheduling=SchedulingSettings(policy="fair")) as toy:
            call = toy.stub.GenerateUnary(
                pb.GenerateUnaryRequest(request=request_for()), metadata=(("x-tenant-id", tenant),)
            )
            if is_taken:
                await call
                assert dict(toy.served.scheduler.snapshot().policy_counters)[tenant] == 3 + 2 * 6
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_async(main())


def test_two_tenants_in_one_call_are_invalid() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            metadata = (("x-tenant-id", "a"), ("x-tenant-id", "b"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "x-tenant-id: '2 values' is not allowed: at most one"

    run_async(main())


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9])
def test_time_that_has_passed_already_ends_every_sample(timeout_s: float) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            error = await error_of(toy, request_within(timeout_s, n=4))
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
            await eventually(lambda: not toy.served.engine.num_open_streams)
            await has_ended(toy)

    run_async(main())


def test_a_request_that_waits_for_too_long_is_refused_with_a_time_to_retry() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with connected_toy(scheduling=SchedulingSettings(max_queue_wait_s=0.05), clock=clock) as toy:
            executor = toy.served.executor
            executor.close_gate()
            first = toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
            await eventually(lambda: toy.served.scheduler.counters.num_running == 1)
            others = [
                toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for(seed=number)))
                for number in range(executor.limits.max_num_seqs)
            ]
            await eventually(lambda: toy.served.engine.num_open_streams == 1 + len(others))
            clock.time_ns += 50_000_000
            executor.allow(float("inf"))
            assert list((await first).token_ids) == toy_output(PROMPT, 6)
            for call in others:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert (caught.value.code(), reason_of(caught.value)) == (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "QUEUE_FULL",
                )

    run_async(main())
