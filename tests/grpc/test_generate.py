"""A generation over a real channel: what arrives, and what is left behind."""

import asyncio

import grpc
import pytest
from chairlift.inference.v1 import inference_pb2 as pb
from grpc_health.v1 import health_pb2

from service.api.params import GenerationParams, TokenPrompt
from service.api.server import ALIVE, INFERENCE
from service.engine.settings import EngineSettings
from tests.doubles import (
    LIMITS,
    MODEL_NAME,
    PROMPT,
    VOCAB_SIZE,
    Connected,
    connected_toy,
    eventually,
    request_for,
    run_async,
    toy_output,
    toy_text,
)


async def responses_to(toy: Connected, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in toy.stub.Generate(request)]


def token_ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [token_id for response in responses for token_id in response.chunk.token_ids]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.chunk.text for response in responses)


def test_stream_is_started_then_chunks_then_complete() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            responses = await responses_to(toy, request_for())
        events = [response.WhichOneof("event") for response in responses]
        expected = toy_output(PROMPT, 6)
        assert events == ["started", *["chunk"] * (len(events) - 2), "complete"]
        assert (responses[0].started.model, responses[0].started.prompt_tokens) == (MODEL_NAME, 3)
        assert token_ids_of(responses) == expected
        assert text_of(responses) == toy_text(expected)
        complete = responses[-1].complete
        assert complete.finish_reason == pb.FINISH_REASON_LENGTH
        assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (3, 6)
        assert not complete.HasField("stop_string")
        timings = complete.timings
        parts = (timings.prepare_duration, timings.first_token_duration, timings.decode_duration)
        assert all(part.ToNanoseconds() > 0 for part in parts)
        assert sum(part.ToNanoseconds() for part in parts) == timings.total_duration.ToNanoseconds()

    run_async(main())


def test_unary_answers_what_the_stream_answers() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for()))
        expected = toy_output(PROMPT, 6)
        assert list(answer.token_ids) == expected
        assert answer.text == toy_text(expected)
        assert answer.complete.finish_reason == pb.FINISH_REASON_LENGTH
        assert answer.complete.usage.completion_tokens == 6

    run_async(main())


def test_text_and_conversation_become_the_tokens_of_tokenizer_and_template() -> None:
    async def main() -> None:
        sampling = pb.SamplingParams(max_tokens=4, temperature=0.0)
        turn = pb.ChatMessages(messages=[pb.ChatMessage(role="w5", content="w17 w333")])
        async with connected_toy() as toy:
            plain = await responses_to(toy, pb.GenerateRequest(text="w5 w17 w333", sampling=sampling))
            chat = await responses_to(toy, pb.GenerateRequest(messages=turn, sampling=sampling))
        assert token_ids_of(plain) == toy_output(PROMPT, 4)
        assert token_ids_of(chat) == toy_output(PROMPT, 4)

    run_async(main())


def test_request_id_is_echoed_or_made_and_sent_on_admission() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            named = toy.stub.Generate(request_for(), metadata=(("x-request-id", "mine-7"),))
            metadata = dict(await named.initial_metadata())
            first = await named.read()
            unnamed = dict(await toy.stub.Generate(request_for()).initial_metadata())
        assert metadata["x-request-id"] == "mine-7"
        assert first.started.request_id == "mine-7"
        assert len(unnamed["x-request-id"]) == 32

    run_async(main())


def test_unset_max_tokens_fills_the_context() -> None:
    async def main() -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(ignore_eos=True))
        async with connected_toy() as toy:
            responses = await responses_to(toy, request)
        assert len(token_ids_of(responses)) == LIMITS.max_model_len - len(PROMPT)
        assert responses[-1].complete.finish_reason == pb.FINISH_REASON_LENGTH

    run_async(main())


@pytest.mark.parametrize("is_unary", [False, True])
def test_stop_string_ends_text_before_it_and_ids_with_the_token_that_completed_it(is_unary: bool) -> None:
    async def main() -> None:
        expected = toy_output(PROMPT, 20)
        stop = toy_text(expected[4:6])  # spans two tokens
        request = request_for(max_tokens=20, stop_strings=[stop, "never"])
        async with connected_toy() as toy:
            if is_unary:
                answer = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
                token_ids, text, complete = list(answer.token_ids), answer.text, answer.complete
            else:
                responses = await responses_to(toy, request)
                token_ids, text, complete = token_ids_of(responses), text_of(responses), responses[-1].complete
            await eventually(lambda: toy.served.has_all_blocks_free)
        assert token_ids == expected[:6]
        assert text == toy_text(expected[:4]) + " "
        assert (complete.finish_reason, complete.stop_string) == (pb.FINISH_REASON_STOP, stop)
        assert complete.usage.completion_tokens == 6

    run_async(main())


def test_stop_token_is_the_last_id_and_no_text() -> None:
    async def main() -> None:
        output = toy_output(PROMPT, 20)
        expected = output[: output.index(output[7]) + 1]
        async with connected_toy() as toy:
            responses = await responses_to(toy, request_for(max_tokens=20, stop_token_ids=[output[7]]))
        assert token_ids_of(responses) == expected
        assert text_of(responses) == toy_text(expected[:-1])
        assert responses[-1].complete.finish_reason == pb.FINISH_REASON_STOP
        assert not responses[-1].complete.HasField("stop_string")

    run_async(main())


def test_many_streams_at_once_get_what_each_gets_alone() -> None:
    async def main() -> None:
        prompts = [[(7 * i) % VOCAB_SIZE, i] for i in range(1, 25)]
        async with connected_toy() as toy:
            answers = await asyncio.gather(
                *(responses_to(toy, request_for(prompt, max_tokens=9)) for prompt in prompts)
            )
            assert toy.served.has_all_blocks_free
        assert [token_ids_of(answer) for answer in answers] == [toy_output(prompt, 9) for prompt in prompts]

    run_async(main())


def test_samples_stream_side_by_side_each_with_its_index() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            responses = await responses_to(toy, request_for(n=3))
            await eventually(lambda: toy.served.has_all_blocks_free)
        expected = toy_output(PROMPT, 6)
        for index in range(3):
            chunks = [response for response in responses if response.chunk.token_ids and response.chunk.index == index]
            assert token_ids_of(chunks) == expected
        completes = {
            response.complete.index: response.complete for response in responses if response.HasField("complete")
        }
        assert sorted(completes) == [0, 1, 2]
        assert [completes[index].usage.cached_prompt_tokens for index in range(3)] == [0, 2, 2]
        assert all(complete.usage.completion_tokens == 6 for complete in completes.values())

    run_async(main())


def test_unary_answers_all_samples() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            response = await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for(n=3)))
        expected = toy_output(PROMPT, 6)
        assert [list(sample.token_ids) for sample in (response, *response.other_samples)] == [expected] * 3
        assert [sample.complete.index for sample in response.other_samples] == [1, 2]

    run_async(main())


def test_every_sample_ends_with_its_stop_string() -> None:
    async def main() -> None:
        stop = toy_text(toy_output(PROMPT, 3)[2:])
        async with connected_toy() as toy:
            request = request_for(n=2, max_tokens=100, stop_strings=[stop])
            responses = await responses_to(toy, request)
            await eventually(lambda: toy.served.has_all_blocks_free)
        assert [response.complete.stop_string for response in responses if response.HasField("complete")] == [stop] * 2

    run_async(main())


def test_a_sample_that_fails_ends_the_rpc_and_frees_the_others() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.failing_seq_ids = [2]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await responses_to(toy, request_for(n=3, max_tokens=100))
            with pytest.raises(grpc.aio.AioRpcError):
                toy.served.executor.failing_seq_ids = [5]
                await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for(n=3, max_tokens=100)))
            await eventually(lambda: toy.served.has_all_blocks_free and not toy.served.engine.num_open_streams)
        assert raised.value.code() is grpc.StatusCode.INTERNAL

    run_async(main())


@pytest.mark.parametrize("count", [0, 17])
def test_samples_are_one_to_sixteen(count: int) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            assert (
                len((await toy.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request_for(n=16)))).other_samples)
                == 15
            )
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await responses_to(toy, request_for(n=count))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n" in str(raised.value.details())

    run_async(main())


def test_the_second_turn_reports_what_it_found_cached() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            first = await responses_to(toy, request_for(range(1, 10)))
            history = [*range(1, 10), *token_ids_of(first), 7]
            tenant = (("x-tenant-id", "other"),)
            other = [response async for response in toy.stub.Generate(request_for(history), metadata=tenant)]
            second = await responses_to(toy, request_for(history))
        usages = [responses[-1].complete.usage for responses in (first, other, second)]
        assert [usage.cached_prompt_tokens for usage in usages] == [0, 0, 12]  # of 14 computed: 3 blocks of 4

    run_async(main())


def test_tokens_that_gather_share_a_chunk() -> None:
    """The engine runs ahead of a reader that does not read: later messages carry several tokens."""

    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.close_gate()
            params = GenerationParams(max_tokens=12, temperature=0.0)
            generation = await toy.served.frontend.submit(TokenPrompt(PROMPT), params)
            toy.served.executor.allow(12)
            await eventually(lambda: toy.served.has_all_blocks_free and not toy.served.engine.num_open_streams)
            chunks = [chunk async for chunk in generation]
        assert [len(chunk.token_ids) for chunk in chunks] == [12]

    run_async(main())


@pytest.mark.parametrize("way", ["cancel", "channel"])
@pytest.mark.parametrize("num_samples", [1, 4])
def test_client_that_goes_leaves_no_block_behind_after_the_step_in_flight(way: str, num_samples: int) -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(2)
            channel = toy.new_channel()
            stub = type(toy.stub)(channel)
            call = stub.Generate(request_for(max_tokens=100, n=num_samples))
            assert (await call.read()).HasField("started")
            assert (await call.read()).HasField("chunk")
            await eventually(lambda: executor.num_arrived == 3)  # planned before the client goes, and held at the gate
            if way == "cancel":
                call.cancel()
            elif way == "channel":
                await channel.close()
            await eventually(lambda: toy.served.engine.num_open_streams == 0)
            executor.allow(1)
            await eventually(lambda: toy.served.has_all_blocks_free)
            assert executor.num_arrived == 3
            if way == "cancel":
                assert await call.code() is grpc.StatusCode.CANCELLED
                await channel.close()

    run_async(main())


@pytest.mark.parametrize("is_unary", [False, True])
@pytest.mark.parametrize(("num_prompt_tokens", "num_steps"), [(3, 2), (100, 1)], ids=["decode", "second chunk"])
def test_client_that_goes_in_any_phase_leaves_no_block_behind_after_the_step_in_flight(
    is_unary: bool, num_prompt_tokens: int, num_steps: int
) -> None:
    async def main() -> None:
        request = request_for(range(1, num_prompt_tokens + 1), max_tokens=20)
        async with connected_toy() as toy:
            executor = toy.served.executor
            executor.close_gate()
            executor.allow(num_steps)
            unary, stream = toy.stub.GenerateUnary, toy.stub.Generate
            call = unary(pb.GenerateUnaryRequest(request=request)) if is_unary else stream(request)
            await eventually(lambda: executor.num_arrived == num_steps + 1)
            call.cancel()
            await eventually(lambda: toy.served.engine.num_open_streams == 0)
            assert not toy.served.has_all_blocks_free
            executor.allow(1)
            await eventually(lambda: toy.served.has_all_blocks_free and not toy.served.scheduler.has_work)
            assert executor.num_arrived == num_steps + 1
            assert await call.code() is grpc.StatusCode.CANCELLED

    run_async(main())


def test_deadline_of_the_call_leaves_no_block_behind_whenever_it_passes() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            executor = toy.served.executor
            executor.close_gate()
            call = toy.stub.Generate(request_for(max_tokens=100), timeout=0.3)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: toy.served.engine.num_open_streams == 0)
            executor.allow(float("inf"))
            await eventually(lambda: toy.served.has_all_blocks_free and not toy.served.scheduler.has_work)
            assert executor.num_arrived <= 1

    run_async(main())


def test_client_that_goes_while_waiting_is_forgotten() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.close_gate()
            call = toy.stub.Generate(request_for())
            await eventually(lambda: toy.served.engine.num_open_streams == 1)
            call.cancel()
            await eventually(lambda: toy.served.engine.num_open_streams == 0)
            toy.served.executor.allow(1)
            await eventually(lambda: toy.served.has_all_blocks_free and not toy.served.scheduler.has_work)
            toy.served.executor.allow(99)
            answer = await responses_to(toy, request_for())
        assert token_ids_of(answer) == toy_output(PROMPT, 6)

    run_async(main())


def test_server_works_on_after_two_thousand_streams_are_killed_at_once() -> None:
    async def main() -> None:
        async with connected_toy(settings=EngineSettings(max_waiting_requests=2048)) as toy:
            toy.served.executor.close_gate()
            channel = toy.new_channel()
            stub = type(toy.stub)(channel)
            calls = [stub.Generate(request_for([i % VOCAB_SIZE, 5], max_tokens=50)) for i in range(2048)]
            await eventually(lambda: toy.served.engine.num_open_streams == len(calls))
            toy.served.executor.allow(1)
            await channel.close()
            await eventually(lambda: toy.served.engine.num_open_streams == 0)
            toy.served.executor.allow(99)
            await eventually(lambda: toy.served.has_all_blocks_free and not toy.served.scheduler.has_work)
            for name in (ALIVE, INFERENCE):
                assert await toy.health(name) == health_pb2.HealthCheckResponse.SERVING
            answer = await responses_to(toy, request_for())
        assert token_ids_of(answer) == toy_output(PROMPT, 6)

    run_async(main(), deadline_s=120.0)  # two thousand streams take their time on a machine that does other work
