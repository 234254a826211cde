"""A log that cannot be written is lost, and nothing else."""

import io
import logging

import structlog

from service.obs.logging import configure_logging


class FullDisk(io.StringIO):
    """A stream that takes a few characters and then no more."""

    def write(self, text: str) -> int:
        if self.tell() > 0:
            raise OSError(28, "No space left on device")
        return super().write(text)


class Terminal(io.StringIO):
    """A stream that shows colours."""

    def isatty(self) -> bool:
        return True


def test_text_has_colours_only_on_a_terminal() -> None:
    for stream, has_colours in ((io.StringIO(), False), (Terminal(), True)):
        configure_logging("info", "text", stream)
        structlog.get_logger().info("server.serving", port=50051)
        logging.getLogger("library").warning("late")
        assert "server.serving" in stream.getvalue() and "late" in stream.getvalue()
        assert has_colours == ("\x1b[" in stream.getvalue())


def test_a_line_that_cannot_be_written_raises_nothing() -> None:
    stream = FullDisk()
    configure_logging("info", "json", stream)
    logger = structlog.get_logger()
    logger.info("first")
    logger.info("second")
    logging.getLogger("library").warning("third")
    assert '"event": "first"' in stream.getvalue()
    assert "second" not in stream.getvalue()


def test_a_closed_stream_raises_nothing() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    stream.close()
    structlog.get_logger().info("late")
