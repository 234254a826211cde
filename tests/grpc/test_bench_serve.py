"""`chairlift bench serve` against a toy server."""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from chairlift.inference.v1 import inference_pb2 as pb
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc

from service.bench.load import NUM_CHANNELS, is_reachable, run_load
from service.bench.timeline import UNFINISHED
from service.commands import bench_serve
from service.commands.bench_serve import measure
from service.engine.settings import EngineSettings
from service.errors import ConfigError
from service.report.latency_limits import LatencyLimits
from tests.doubles import VOCAB_SIZE, connected_toy, eventually, request_for, run_async
from tests.unit.test_cli import run_cli


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return parser.parse_args(list(flags))


def test_every_request_is_answered_and_counted_at_each_rate() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            flags = ["--target", f"127.0.0.1:{toy.port}", "--rates", "200,inf", "--num-requests", "20"]
            flags += ["--prompts", "uniform:1:8", "--outputs", "fixed:6", "--vocab-size", str(VOCAB_SIZE)]
            args = parse(*flags)
            feed = bench_serve._feed(args)
            reports = await measure(args, feed, LatencyLimits())
            assert toy.served.scheduler.counters.totals.num_submitted == 1 + 2 * 20  # a warm-up, and two runs
        num_prompt_tokens = sum(len(request.token_ids.ids) for request in feed.requests)
        assert [report.rate for report in reports] == [200.0, float("inf")]
        for report in reports:
            assert report.requests == {
                "planned": 20,
                "sent": 20,
                "completed": 20,
                "failed": 0,
                "unfinished": 0,
                "good": 20,
            }
            assert (report.tokens["prompt"], report.tokens["output"]) == (num_prompt_tokens, 120)
            assert 0 < report.latency_ms["ttft"]["mean"] <= report.latency_ms["e2el"]["mean"]
        assert reports[1].peak["concurrency"] > 1

    run_async(main())


def test_no_rate_finds_the_drawn_prompts_of_another_in_the_cache() -> None:
    """Thirteen tokens are three full blocks of four, and one that is always computed."""

    async def main() -> None:
        async with connected_toy() as toy:
            flags = ["--target", f"127.0.0.1:{toy.port}", "--rates", "inf,inf", "--num-requests", "3"]
            args = parse(*flags, "--prompts", "fixed:13", "--outputs", "fixed:2", "--vocab-size", str(VOCAB_SIZE))
            reports = await measure(args, bench_serve._feed(args), LatencyLimits())
        assert [(report.tokens["prompt"], report.tokens["cached_prompt"]) for report in reports] == [(39, 0), (39, 0)]

    run_async(main())


def test_drawn_loads_differ_in_tokens_between_runs_and_in_all_between_seeds() -> None:
    def load(seed: int, run_number: int) -> list[tuple[list[int], int]]:
        requests = bench_serve._random_requests(parse("--seed", str(seed)), 20, run_number)
        return [(list(request.token_ids.ids), request.sampling.max_tokens) for request in requests]

    def lengths(seed: int, run_number: int) -> list[tuple[int, int]]:
        return [(len(ids), max_tokens) for ids, max_tokens in load(seed, run_number)]

    assert load(5, 1) == load(5, 1)
    assert lengths(5, 1) == lengths(5, 2) != lengths(6, 1)
    assert not any(ids == other for (ids, _), (other, _) in zip(load(5, 1), load(5, 2), strict=True))


def test_a_tenants_prompt_is_cached_for_that_tenant_alone(tmp_path: Path) -> None:
    """Thirteen tokens are three full blocks of four, and one that is always computed."""
    prompt = {"prompt_token_ids": list(range(1, 14)), "max_tokens": 2}

    async def main() -> list[int]:
        cached = []
        async with connected_toy() as toy:
            for tenant in ("a", "b", "a", "b", None, None):
                path = tmp_path / "requests.jsonl"
                path.write_text(json.dumps(prompt | {"tenant": tenant}), encoding="utf-8")
                args = parse("--target", f"127.0.0.1:{toy.port}", "--requests", str(path), "--warm-up", "0")
                (report,) = await measure(args, bench_serve._feed(args), LatencyLimits())
                cached.append(report.tokens["cached_prompt"])
                assert list(report.tenant_ttft_ms) == ([tenant] if tenant else [])
        return cached

    assert run_async(main()) == [0, 0, 12, 12, 0, 12]


def test_load_is_open_a_full_server_does_not_hold_requests_back() -> None:
    """No step ever begins, so no answer comes, and yet every request is sent when it is due."""

    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.close_gate()
            requests = [request_for() for _ in range(12)]
            sending = asyncio.create_task(run_load(f"127.0.0.1:{toy.port}", requests, [0.0] * 12, max_seconds=60))
            await eventually(lambda: toy.served.engine.num_open_streams == 12)
            toy.served.executor.allow(float("inf"))
            result = await sending
        assert all(timeline.is_completed for timeline in result.timelines)

    run_async(main())


def test_no_call_waits_for_its_connection_to_be_made() -> None:
    """When the first call arrives, through a proxy that counts connections, there are all those of the later ones."""
    connected = []

    async def main() -> None:
        async with connected_toy() as toy:

            async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connected.append(writer)
                of_server, to_server = await asyncio.open_connection("127.0.0.1", toy.port)
                await asyncio.gather(_copy(reader, to_server), _copy(of_server, writer))

            async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
                toy.served.executor.close_gate()
                port = proxy.sockets[0].getsockname()[1]
                sending = asyncio.create_task(run_load(f"127.0.0.1:{port}", [request_for()], [0.0], max_seconds=60))
                await eventually(lambda: toy.served.engine.num_open_streams == 1)
                assert len(connected) == NUM_CHANNELS
                toy.served.executor.allow(float("inf"))
                (timeline,) = (await sending).timelines
                assert timeline.is_completed

    run_async(main())


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
    writer.close()


def test_server_that_answers_no_connection_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not run_async(is_reachable(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.1))


def test_requests_to_a_server_that_has_gone_fail() -> None:
    result = run_async(run_load("127.0.0.1:1", [request_for(), request_for()], [0.0, 0.0], max_seconds=60))
    assert [timeline.error for timeline in result.timelines] == ["UNAVAILABLE"] * 2


def test_refused_requests_fail_with_their_status() -> None:
    async def main() -> None:
        async with connected_toy(settings=EngineSettings(max_waiting_requests=1)) as toy:
            toy.served.executor.close_gate()
            seen = [(0, 0)]
            load = run_load(
                f"127.0.0.1:{toy.port}",
                [request_for() for _ in range(4)],
                [0.0] * 4,
                max_seconds=60,
                on_progress=lambda num_ended, num_running: seen.append((num_ended, num_running)),
            )
            sending = asyncio.create_task(load)
            await eventually(lambda: seen[-1] == (3, 1))
            toy.served.executor.allow(float("inf"))
            result = await sending
        assert sorted(timeline.error for timeline in result.timelines) == ["", *["RESOURCE_EXHAUSTED"] * 3]

    run_async(main())


def test_what_runs_when_time_is_up_is_cancelled_on_the_server_too() -> None:
    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.close_gate()
            target = f"127.0.0.1:{toy.port}"
            result = await run_load(target, [request_for(), request_for()], [0.0, 3600.0], max_seconds=2.0)
            assert [timeline.error for timeline in result.timelines] == [UNFINISHED]
            await eventually(lambda: toy.served.engine.num_open_streams == 0)

    run_async(main())


def test_tokens_of_a_stream_that_does_not_say_how_many_they_were_are_counted() -> None:
    class Abrupt(pb_grpc.InferenceServiceServicer):
        async def Generate(
            self, request: pb.GenerateRequest, context: "grpc.aio.ServicerContext[object, object]"
        ) -> AsyncIterator[pb.GenerateResponse]:
            for token_ids in ([1], [2, 3, 4]):
                yield pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=token_ids))

    async def main() -> None:
        server = grpc.aio.server()
        pb_grpc.add_InferenceServiceServicer_to_server(Abrupt(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            (timeline,) = (await run_load(f"127.0.0.1:{port}", [request_for()], [0.0], max_seconds=60)).timelines
        finally:
            await server.stop(None)
        assert timeline.is_completed and timeline.output_tokens == 4
        assert timeline.tpot_s == pytest.approx((timeline.chunk_times_s[1] - timeline.chunk_times_s[0]) / 3)

    run_async(main())


def test_request_that_was_not_due_when_time_was_up_is_planned_and_never_sent(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": arrival_s, "prompt_token_ids": [1], "max_tokens": 2} for arrival_s in (0, 3600)]
    path.write_text("\n".join(map(json.dumps, lines)))

    async def main() -> None:
        async with connected_toy() as toy:
            toy.served.executor.close_gate()
            flags = ["--target", f"127.0.0.1:{toy.port}", "--requests", str(path), "--arrivals", "trace"]
            args = parse(*flags, "--warm-up", "0", "--max-seconds", "2")
            (report,) = await measure(args, bench_serve._feed(args), LatencyLimits())
        counts = {"planned": 2, "sent": 1, "completed": 0, "failed": 0, "unfinished": 1, "good": 0}
        assert report.requests == counts

    run_async(main())


def test_trace_is_sent_in_the_order_of_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0.2 - 0.1 * i, "prompt_token_ids": [i + 1], "max_tokens": 2} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    feed = bench_serve._feed(parse("--requests", str(path), "--arrivals", "trace"))
    assert [list(request.token_ids.ids) for request in feed.requests] == [[3], [2], [1]]
    assert feed.arrival_s == pytest.approx([0.0, 0.1, 0.2])


def test_file_of_requests_is_used_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 1}\n\n{"prompt": "b", "max_tokens": 1}\n')
    feed = bench_serve._feed(parse("--requests", str(path), "--num-requests", "5"))
    assert [request.text for request in feed.requests] == ["a", "b", "a", "b", "a"]
    assert len(bench_serve._feed(parse("--requests", str(path))).requests) == 2


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        ("", [], "holds no request"),
        ("x", [], r"requests\.jsonl:1: "),
        ('{"prompt": "a", "colour": 1}', [], r"requests\.jsonl:1: colour"),
        ('{"prompt": "a"}', ["--arrivals", "trace"], "needs arrival_s in every line"),
        ('{"prompt": "a", "arrival_s": -1}', ["--arrivals", "trace"], "arrival_s is -1"),
        ('{"prompt": "a", "arrival_s": 1' + 400 * "0" + "}", ["--arrivals", "trace"], r"requests\.jsonl:1: "),
        ('{"prompt": "a", "priority": 11}', [], r"requests\.jsonl:1: priority: 11 .*-10 to 10"),
        ('{"prompt": "a", "n": 2}', [], r"requests\.jsonl:1: n is 2"),
        ('{"prompt": "a", "stop_token_ids": [-1]}', [], r"requests\.jsonl:1: stop_token_ids: \[-1\]"),
    ],
)
def test_file_that_cannot_be_sent_is_refused(text: str, flags: list[str], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        bench_serve._feed(parse("--requests", str(path), *flags))


def test_file_that_is_no_utf_8_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\xff\xfe\n')
    with pytest.raises(ConfigError, match=r"requests\.jsonl:2: "):
        bench_serve._feed(parse("--requests", str(path)))


@pytest.mark.parametrize("num_warm_up", ["1", "0"])
def test_server_that_is_not_there_is_one_line_and_2(num_warm_up: str) -> None:
    done = run_cli("bench", "serve", "--target", "127.0.0.1:1", "--num-requests", "3", "--warm-up", num_warm_up)
    assert done.returncode == 2
    assert done.stderr.startswith("chairlift bench serve: 127.0.0.1:1: UNAVAILABLE: ")
    assert len(done.stderr.splitlines()) == 1
