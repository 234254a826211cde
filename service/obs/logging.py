"""Structured logs: one JSON object a line, or readable lines on a terminal. Never prompts, text or token ids."""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str, log_format: str = "auto", stream: TextIO = sys.stderr) -> None:
    """Set the process's logging up, once. `log_format` is json, text, or auto: text on a terminal. Text has colours
    only there.

    Records of the standard library's loggers come out the same way.
    """
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    lossy = cast(TextIO, _LossyStream(stream))
    renderer: Processor = structlog.processors.JSONRenderer()
    if is_text:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not is_text:
        shared.append(structlog.processors.format_exc_info)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=lossy),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(lossy)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)


class _LossyStream:
    """Writes to a stream, and drops what it does not take: a full disk or a closed pipe must not fail a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
