"""The offline batch over a toy model."""

import errno
import io
import json
from pathlib import Path

import pytest

from service.commands.request_lines import error_line, parse_line
from service.commands.result_file import open_results
from service.commands.run import BatchRun, request_lines
from service.errors import EngineDeadError, ExecutorError
from tests.doubles import PROMPT, run_async, served_toy, toy_output, toy_text
from tests.unit.test_cli import run_cli
from tests.unit.test_manifest import write_folder


def test_every_line_gets_its_result_and_a_bad_one_stops_nothing() -> None:
    async def main() -> None:
        lines = [{"id": i, "prompt_token_ids": [i, 5], "max_tokens": 1 + i, "temperature": 0} for i in range(20)]
        requests = [
            *map(json.dumps, lines[:10]),
            "nonsense",
            "",
            '{"id": "b", "prompt": ""}',
            *map(json.dumps, lines[10:]),
        ]
        output = io.StringIO()
        async with served_toy() as toy:
            tally = await BatchRun(toy.frontend, output, max_in_flight=5).answer(request_lines(requests))
            assert toy.has_all_blocks_free
        results = [json.loads(line) for line in output.getvalue().splitlines()]
        good = {result["id"]: result for result in results if "error" not in result}
        assert {i: result["token_ids"] for i, result in good.items()} == {
            i: toy_output([i, 5], 1 + i) for i in range(20)
        }
        assert good[3]["text"] == toy_text(toy_output([3, 5], 4))
        assert good[3]["finish_reason"] == "length"
        assert good[3]["usage"] == {"prompt_tokens": 2, "cached_prompt_tokens": 0, "completion_tokens": 4}
        assert set(good[3]["timings"]) == {"prepare_ms", "first_token_ms", "decode_ms", "total_ms"}
        bad = {result["id"]: result["error"] for result in results if "error" in result}
        assert set(bad) == {None, "b"} and "prompt" in bad["b"]
        assert bad[None] == "line 11 is not JSON: Expecting value at column 1"
        assert {result["id"]: result["line"] for result in results if "error" in result} == {None: 11, "b": 13}
        assert (tally.num_requests, tally.num_errors) == (22, 2)
        assert (tally.prompt_tokens, tally.completion_tokens) == (40, sum(range(1, 21)))

    run_async(main())


def test_lines_start_in_the_order_given() -> None:
    async def main() -> None:
        lines = [json.dumps({"id": i, "prompt_token_ids": [i], "max_tokens": 1 + 3 * i % 5}) for i in range(5)]
        output = io.StringIO()
        async with served_toy() as toy:
            await BatchRun(toy.frontend, output, max_in_flight=1).answer(request_lines(lines))
        assert [json.loads(line)["id"] for line in output.getvalue().splitlines()] == [0, 1, 2, 3, 4]

    run_async(main())


def test_stop_string_in_the_middle_of_a_batch() -> None:
    async def main() -> None:
        expected = toy_output(PROMPT, 20)
        stop = toy_text(expected[4:6])
        request = {"id": 1, "prompt_token_ids": PROMPT, "max_tokens": 20, "temperature": 0, "stop": stop}
        output = io.StringIO()
        async with served_toy() as toy:
            await BatchRun(toy.frontend, output, max_in_flight=1).answer([parse_line(json.dumps(request), 1)])
        result = json.loads(output.getvalue())
        assert (result["token_ids"], result["finish_reason"]) == (expected[:6], "stop")

    run_async(main())


def test_every_sample_of_a_line_gets_its_result() -> None:
    async def main() -> None:
        request = {"id": 1, "prompt_token_ids": PROMPT, "max_tokens": 5, "temperature": 0, "n": 3}
        output = io.StringIO()
        async with served_toy() as toy:
            tally = await BatchRun(toy.frontend, output, max_in_flight=1).answer([parse_line(json.dumps(request), 1)])
        results = [json.loads(line) for line in output.getvalue().splitlines()]
        assert [(result["id"], result["index"]) for result in results] == [(1, 0), (1, 1), (1, 2)]
        assert [result["token_ids"] for result in results] == [toy_output(PROMPT, 5)] * 3
        assert [result["usage"]["cached_prompt_tokens"] for result in results] == [0, 2, 2]
        assert (tally.prompt_tokens, tally.completion_tokens) == (3, 15)

    run_async(main())


def test_request_that_fails_in_the_engine_stops_nothing() -> None:
    async def main() -> None:
        lines = [json.dumps({"id": i, "prompt_token_ids": [i], "max_tokens": 5}) for i in range(4)]
        output = io.StringIO()
        async with served_toy() as toy:
            toy.executor.failing_seq_ids = [2]
            tally = await BatchRun(toy.frontend, output, max_in_flight=4).answer(request_lines(lines))
        assert (tally.num_requests, tally.num_errors) == (4, 1)
        assert sum("error" in json.loads(line) for line in output.getvalue().splitlines()) == 1

    run_async(main())


def test_dead_engine_ends_the_run() -> None:
    async def main() -> None:
        lines = [json.dumps({"prompt_token_ids": [i], "max_tokens": 5}) for i in range(50)]
        async with served_toy() as toy:
            toy.executor.errors.append(ExecutorError("for good"))
            with pytest.raises(EngineDeadError):
                await BatchRun(toy.frontend, io.StringIO(), max_in_flight=4).answer(request_lines(lines))

    run_async(main())


def test_full_disk_ends_the_run_in_one_error() -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, f"no space for {len(text)} characters")

    async def main() -> None:
        lines = [json.dumps({"prompt_token_ids": [i], "max_tokens": 5}) for i in range(50)]
        async with served_toy() as toy:
            with pytest.raises(OSError, match="no space for"):
                await BatchRun(toy.frontend, FullDisk(), max_in_flight=4).answer(request_lines(lines))

    run_async(main())


@pytest.mark.parametrize("line", ["short\n", 100_000 * "long"], ids=["short", "long"])
def test_file_that_cannot_take_the_results_is_named(line: str) -> None:
    """A short line fails when it is flushed, in the end; a long one at once."""
    path = Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as full, open_results(path) as output:
        output.write(line)
    assert (errno.ENOSPC, path) == (full.value.errno, full.value.filename)


@pytest.mark.parametrize(("name", "complaint"), [("absent", "no such file"), ("", "is a folder")])
def test_what_holds_no_requests_is_one_line_and_2(name: str, complaint: str, tmp_path: Path) -> None:
    requests = tmp_path / name
    done = run_cli("run", "--model", "nowhere", "--requests", str(requests), "--output", str(tmp_path / "out.jsonl"))
    assert (2, f"chairlift run: {requests}: {complaint}\n") == (done.returncode, done.stderr)


def test_results_of_an_earlier_run_outlive_a_model_that_does_not_load(tmp_path: Path) -> None:
    requests, output, model = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "model"
    requests.write_text("")
    output.write_text("earlier")
    model.mkdir()
    write_folder(model)  # its tokenizer is no tokenizer
    done = run_cli("run", "--model", str(model), "--requests", str(requests), "--output", str(output))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert output.read_text() == "earlier"


def test_folder_of_the_results_is_missed_before_the_model_is_looked_at(tmp_path: Path) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "missing" / "out.jsonl"
    requests.write_text("")
    done = run_cli("run", "--model", "nowhere", "--requests", str(requests), "--output", str(output))
    assert done.returncode == 2
    assert done.stderr == f"chairlift run: {output}: its folder does not exist\n"


@pytest.mark.parametrize("line_id", ["naïve ☃", "half a pair: \ud800"])
def test_id_of_any_characters_comes_back_as_it_was(line_id: str, tmp_path: Path) -> None:
    with open_results(tmp_path / "out.jsonl") as output:
        output.write(error_line(parse_line(json.dumps({"id": line_id})), ExecutorError("no")))
    assert json.loads((tmp_path / "out.jsonl").read_bytes())["id"] == line_id
