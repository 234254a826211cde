"""`chairlift serve`: a model behind gRPC, until SIGTERM."""

import asyncio
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import structlog
import uvloop

from service import config
from service.api.server import Server
from service.api.settings import ServerSettings
from service.commands.assembly import load_model
from service.engine.health import EngineState
from service.engine.scheduling import SchedulingSettings
from service.engine.settings import EngineSettings
from service.obs.engine_log import EngineLog
from service.obs.logging import configure_logging

LAYERS = (config.ExecutorSettings, EngineSettings, SchedulingSettings, ServerSettings, config.LogSettings)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `serve`."""
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="folder that `chairlift export` wrote")
    config.add_arguments(parser, *LAYERS)


def run(args: Namespace) -> int:
    """Serve until a signal ends it. 0 after an orderly end, 1 when the engine had died before."""
    config.check_environment()
    # Till the server listens for it: else the first process of a container, as this may be, does not get it at all.
    # Without unwinding, for the engine's thread may be at work.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(args))


async def _serve(args: Namespace) -> int:
    executor, engine = config.load(config.ExecutorSettings, args), config.load(EngineSettings, args)
    scheduling = config.load(SchedulingSettings, args)
    server_settings, logs = config.load(ServerSettings, args), config.load(config.LogSettings, args)
    configure_logging(logs.log_level, logs.log_format, sys.stdout)
    log = structlog.get_logger("chairlift.serve")
    server = Server(server_settings)
    port = server.bind()
    model = load_model(args.model, executor, engine, EngineLog(), scheduling)
    async with model.running():
        term, hurry = _listen_for_signals()
        await server.start(model.engine, model.frontend)
        # Not before: a start that fails says why, and nothing else.
        settings = (executor, engine, scheduling, server_settings, logs)
        log.info("server.settings", model=str(args.model), **config.printable(settings))
        limits = model.frontend.limits
        log.info(
            "server.serving",
            host=server_settings.host,
            port=port,
            model=limits.model_name,
            max_model_len=limits.max_model_len,
            kv_tokens=limits.max_kv_tokens,
        )
        await term.wait()
        log.info("server.draining", open_streams=model.engine.num_open_streams)
        await server.drain(hurry)
    is_dead = model.engine.state is EngineState.DEAD
    log.info("server.stopped", engine=model.engine.state.value)
    return int(is_dead)


def _listen_for_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events for the first SIGTERM or SIGINT, which asks for an orderly end, and for the second, which hurries it."""
    term, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if term.is_set() else term).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return term, hurry
