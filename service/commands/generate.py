"""`chairlift generate`: one answer, streamed to the terminal."""

import asyncio
import io
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path
from types import TracebackType

import grpc
from chairlift.inference.v1 import inference_pb2, inference_pb2_grpc

from service import config
from service.api.convert import request_message
from service.api.params import ChatPrompt, GenerationParams, Prompt, TextPrompt
from service.commands.target import host_port
from service.core.types import FinishReason
from service.engine.settings import EngineSettings
from service.errors import ChairliftError, ConfigError
from service.obs.engine_log import EngineLog
from service.obs.logging import configure_logging

NUMBERS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate (default: what is left of the context)"),
    "temperature": (float, "0 always takes the likeliest token (default 1)"),
    "top_k": (int, "keep the k likeliest tokens; 0 keeps all (default 0)"),
    "top_p": (float, "keep the likeliest tokens that have this mass (default 1)"),
    "min_p": (float, "drop tokens less likely than this fraction of the likeliest (default 0)"),
    "repetition_penalty": (float, "divide the logits of tokens that occurred (default 1)"),
    "frequency_penalty": (float, "lower a token's logit by this for each time it was generated (default 0)"),
    "presence_penalty": (float, "lower a token's logit by this once it was generated (default 0)"),
    "seed": (int, "same seed, same answer (default: drawn at random)"),
    "min_tokens": (int, "do not end before this many tokens (default 0)"),
    "priority": (int, "goes before requests of lower ones, -10 to 10, where the server looks at it (default 0)"),
    "timeout_s": (float, "seconds for the whole answer (default: as long as it takes)"),
}


class RemoteError(ChairliftError):
    """A server answered with an error status, or not at all."""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `generate`."""
    parser.add_argument("prompt", metavar="PROMPT", help="what to answer, or with --raw to continue")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="load this model folder")
    where.add_argument("--target", type=host_port, metavar="HOST:PORT", help="ask this server")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it stands, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling_arguments(parser)
    config.add_arguments(parser, config.ExecutorSettings)


def add_sampling_arguments(parser: ArgumentParser) -> None:
    """Add a flag for each sampling field that one can type."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in NUMBERS.items():
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=SUPPRESS, metavar=metavar, help=text)
    group.add_argument("--ignore-eos", action=BooleanOptionalAction, default=False, help="go on after the model's end")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )


def run(args: Namespace) -> int:
    """Stream the answer."""
    sampling = {name: getattr(args, name) for name in NUMBERS if hasattr(args, name)}
    params = GenerationParams(ignore_eos=args.ignore_eos, stop_strings=args.stop, **sampling)
    if args.target is not None:
        cut_after = _ask_server(args.target, chosen_prompt(args, has_template=True), params)
    else:
        config.check_environment()
        cut_after = asyncio.run(_ask_model(args, params))
    if cut_after is not None:
        print(f"chairlift generate: {cut_notice(cut_after, params.max_tokens)}", file=sys.stderr)
    return 0


def cut_notice(num_tokens: int, max_tokens: int | None) -> str:
    """Why an answer ended after `num_tokens` without the model's having ended it."""
    reason = "--max-tokens" if num_tokens == max_tokens else "the context is full"
    return f"the answer was cut after {num_tokens} tokens: {reason}"


def chosen_prompt(args: Namespace, *, has_template: bool) -> Prompt:
    """What is asked. Raises ConfigError for a system message that the model would never see."""
    if args.raw or not has_template:
        if args.system is not None:
            reason = "--raw continues a plain text" if args.raw else "the model has no chat template"
            raise ConfigError(f"--system cannot be used: {reason}")
        return TextPrompt(args.prompt)
    system = [] if args.system is None else [("system", args.system)]
    return ChatPrompt([*system, ("user", args.prompt)])


async def _ask_model(args: Namespace, params: GenerationParams) -> int | None:
    """Show the answer. Yields its tokens when it was cut."""
    from service.commands.assembly import load_model  # noqa: PLC0415 asking a server needs no ONNX Runtime

    configure_logging("warning")
    executor = config.load(config.ExecutorSettings, args)
    model = load_model(args.model, executor, config.load(EngineSettings), EngineLog())
    async with model.running():
        prompt = chosen_prompt(args, has_template=model.frontend.has_chat_template)
        with AnswerText() as answer, await model.frontend.submit(prompt, params) as generation:
            async for chunk in generation:
                answer.show(chunk.text)
        return generation.num_completion_tokens if generation.finish_reason is FinishReason.LENGTH else None


def _ask_server(target: str, prompt: Prompt, params: GenerationParams) -> int | None:
    """Show the answer. Yields its tokens when it was cut."""
    complete = inference_pb2.GenerateComplete()
    with grpc.insecure_channel(target) as channel, AnswerText() as answer:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for response in stub.Generate(request_message(prompt, params)):
                answer.show(response.chunk.text)
                complete = response.complete
        except grpc.RpcError as error:
            raise RemoteError(f"{target}: {error.code().name}: {error.details()}") from error
    is_cut = complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    return int(complete.usage.completion_tokens) if is_cut else None


class AnswerText:
    """The answer's text on stdout, as it comes. Leaving it ends the line, so that an error has one of its own."""

    def __init__(self) -> None:
        self._is_line_open = False

    def __enter__(self) -> "AnswerText":
        """The text itself. What the terminal's encoding lacks is written escaped."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End a whole answer with a newline, a broken one only where it stopped within a line."""
        if kind is None or self._is_line_open:
            self.show("\n")

    def show(self, text: str) -> None:
        """Write `text` through to the terminal."""
        if text:
            self._is_line_open = not text.endswith("\n")
        sys.stdout.write(text)
        sys.stdout.flush()
