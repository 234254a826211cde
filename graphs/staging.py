"""Writing a folder so that it is there as a whole or not at all."""

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Final, NoReturn

from graphs.errors import ExportError
from graphs.manifest import MANIFEST_NAME

_FOLDER_MODE: Final = 0o755
_SIGNALS: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def require_replaceable(out: Path, overwrite: bool) -> None:
    """Raise ExportError unless `out` is absent, an empty folder, or a model folder that may be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise ExportError(f"{out}: exists and is not a folder")
    if (out / MANIFEST_NAME).is_file():
        if not overwrite:
            raise ExportError(f"{out}: is a model folder already; add --overwrite, or choose another --out")
    elif any(out.iterdir()):
        raise ExportError(f"{out}: exists and is not a model folder; it is left alone")


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, gone when the `with` ends, however it ends, unless it was renamed.

    Raises ExportError when it cannot be made, and in place of any OSError inside.
    """
    parent = out.resolve().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=parent))
    except OSError as error:
        raise ExportError(f"{out}: cannot be written: {error}") from error
    try:
        with _signals_unwind():
            yield folder
    except OSError as error:
        raise ExportError(f"{out}: export failed: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, out: Path) -> None:
    """Put the finished `folder` in the place of `out`; what was there is removed last."""
    folder.chmod(_FOLDER_MODE)
    out = out.resolve()
    if not out.exists():
        folder.rename(out)
        return
    old = Path(mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    out.replace(old)
    try:
        folder.rename(out)
    except BaseException:
        old.replace(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let the signals that end a process unwind it first, as an interrupt from the keyboard does.

    Only on the main thread, which receives them, and only those that nobody else handles.
    """
    handled = []
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)
