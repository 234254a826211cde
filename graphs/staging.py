"""Writing a folder so that it is there as a whole or not at all, by one writer at a time."""

import errno
import fcntl
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import FrameType
from typing import Final, NoReturn, TextIO

import structlog

from graphs.errors import ExportError
from graphs.manifest import MANIFEST_NAME

log = structlog.get_logger("chairlift.export")

_FOLDER_MODE: Final = 0o755
_PARTIAL: Final = ".partial"
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without flock answers
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

    Nobody else gets one for the same `out` meanwhile, where the file system knows locks; there, those of exports that
    were killed are removed first. Raises ExportError when it cannot be made or somebody else has one, and in place of
    any OSError inside.
    """
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock, is_exclusive = _lock(target.with_name(f".{target.name}.lock"))
    except BlockingIOError as error:
        raise ExportError(f"{out}: another export is writing it") from error
    except OSError as error:
        raise ExportError(f"{out}: cannot be written: {error}") from error
    try:
        if is_exclusive:
            _remove_orphans(target)
        with (
            TemporaryDirectory(
                prefix=f".{target.name}.", suffix=_PARTIAL, dir=target.parent, ignore_cleanup_errors=True
            ) as folder,
            _signals_unwind(),
        ):
            yield Path(folder)
    except OSError as error:
        raise ExportError(f"{out}: export failed: {error}") from error
    finally:
        Path(lock.name).unlink(missing_ok=True)  # still locked: whoever has it open sees that it is no more
        lock.close()


def _lock(path: Path) -> tuple[TextIO, bool]:
    """The file `path`, locked until it is closed or the process ends. Raises OSError, when taken BlockingIOError.

    On a file system without locks it is only open; whether it is locked is the second value.
    """
    while True:
        with ExitStack() as on_failure:
            file, is_locked = on_failure.enter_context(path.open("w")), True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                is_locked = False
            # Its last owner may have removed it after we opened it; then somebody else may hold another of its name.
            if os.fstat(file.fileno()).st_nlink > 0:
                on_failure.pop_all()
                return file, is_locked


def _remove_orphans(target: Path) -> None:
    """Remove what killed exports to `target` were writing. Whoever calls it holds the lock, so that no other is alive.

    What cannot be removed stays, for it is in nobody's way.
    """
    # No dot in between: else it belongs to a target whose name only begins like this one's.
    orphan = re.compile(rf"{re.escape(f'.{target.name}.')}[^.]+{re.escape(_PARTIAL)}")
    for path in list(target.parent.iterdir()):
        if orphan.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                log.warning("export.orphan_removed", folder=str(path))


def publish(folder: Path, out: Path, overwrite: bool) -> None:
    """Put the finished `folder` in the place of `out`; what was there is removed last.

    Raises ExportError when `out` has become something that may not be replaced.
    """
    require_replaceable(out, overwrite)
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
