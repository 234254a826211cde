"""A log that cannot be written is lost, and nothing else."""

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from service.obs.logging import configure_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Gives the process's logging back as it was."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()


class FullDisk(io.StringIO):
    """A stream that takes a few characters and then no more."""

    def write(self, text: str) -> int:
        if self.tell() > 0:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_line_that_cannot_be_written_raises_nothing(restored_logging: None) -> None:
    stream = FullDisk()
    configure_logging("info", "json", stream)
    logger = structlog.get_logger()
    logger.info("first")
    logger.info("second")
    logging.getLogger("library").warning("third")
    assert '"event": "first"' in stream.getvalue()
    assert "second" not in stream.getvalue()


def test_a_closed_stream_raises_nothing(restored_logging: None) -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    stream.close()
    structlog.get_logger().info("late")
