"""What a model folder holds: `manifest.json`, its names, sizes and hashes. Standard library only.

    prefill.onnx  decode.onnx  weights.bin  tokenizer.json  [chat_template.jinja]  manifest.json

The exporter writes the manifest last; whoever loads a folder reads it first. `check_sizes` is cheap enough for every
start, `verify_files` reads every byte.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from graphs.encoding import is_utf8
from graphs.json_object import JsonFieldError, JsonObject

FORMAT_VERSION: Final = 3
MANIFEST_NAME: Final = "manifest.json"
PREFILL_NAME: Final = "prefill.onnx"
DECODE_NAME: Final = "decode.onnx"
WEIGHTS_NAME: Final = "weights.bin"
TOKENIZER_NAME: Final = "tokenizer.json"
CHAT_TEMPLATE_NAME: Final = "chat_template.jinja"
REQUIRED_FILES: Final = (PREFILL_NAME, DECODE_NAME, WEIGHTS_NAME, TOKENIZER_NAME)
WEIGHT_FORMATS: Final = ("w8a8", "int8", "int4", "float32", "float16", "bfloat16")
MAX_DIMENSION: Final = 2**31 - 1  # shapes and token ids are int32 in the graphs
GGUF_MAGIC: Final = b"GGUF"  # the first bytes of such a file

_HASH_CHUNK_BYTES = 1 << 20


class ManifestError(ValueError):
    """A model folder cannot be used: the message names the folder or file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model's dimensions and special tokens, as far as whoever serves it needs them."""

    name: str
    architecture: str  # "llama", ...
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    context_length: int  # tokens; positions run from 0 to context_length - 1
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool  # the tokenizer puts the bos token in front of a plain text


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the folder."""

    sha256: str  # 64 lower-case hexadecimal digits
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Hash `path` as a stream. Raises OSError when it cannot be read."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
            return cls(digest.hexdigest(), file.tell())


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    model: ModelInfo
    weight_format: str  # one of WEIGHT_FORMATS
    files: Mapping[str, FileRecord]  # by file name, the manifest itself excluded
    source: Mapping[str, str] = field(default_factory=dict)  # where the weights came from
    tools: Mapping[str, str] = field(default_factory=dict)  # versions of what wrote the folder
    format_version: int = FORMAT_VERSION

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read and check `folder`'s manifest; of the other files only their existence is checked.

        Raises ManifestError when the folder or a required file is missing, the JSON is bad, a field is missing, of the
        wrong type or out of range, or the folder was written by a newer exporter; of what can be exported it says so.
        """
        if not is_utf8(str(folder)):
            raise ManifestError(f"model folder: {str(folder)!r} is not allowed: UTF-8 only")
        if not folder.is_dir():
            raise ManifestError(_not_a_folder(folder))
        path = folder / MANIFEST_NAME
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            if (folder / "config.json").is_file():
                raise ManifestError(_to_be_exported(folder, "a Hugging Face folder")) from None
            raise ManifestError(f"{folder}: no {MANIFEST_NAME}; not a model folder") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"{path}: cannot be read: {error}") from error
        manifest = cls.from_json(text, str(path))
        for name in (*REQUIRED_FILES, *manifest.files):
            if name not in manifest.files:
                raise ManifestError(f"{path}: files: lists no {name}")
            if not (folder / name).is_file():
                raise ManifestError(f"{folder}: {name} is missing")
        return manifest

    @classmethod
    def from_json(cls, text: str, origin: str = MANIFEST_NAME) -> "Manifest":
        """Parse the manifest's JSON. Raises ManifestError whose message starts with `origin`."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{origin}: not valid JSON: {error}") from error
        try:
            return cls._of(JsonObject(document, origin))
        except JsonFieldError as error:
            raise ManifestError(str(error)) from error

    @classmethod
    def _of(cls, fields: JsonObject) -> "Manifest":
        origin = fields.origin
        version = fields.integer("format_version", minimum=1)
        if version > FORMAT_VERSION:
            raise ManifestError(
                f"{origin}: format_version {version} is newer than {FORMAT_VERSION}, the newest this release reads"
            )
        if version < FORMAT_VERSION:
            raise ManifestError(
                f"{origin}: format_version {version} is older than {FORMAT_VERSION}, the oldest this release reads; "
                "export the model again"
            )
        weight_format = fields.string("weight_format")
        if weight_format not in WEIGHT_FORMATS:
            raise ManifestError(f"{origin}: weight_format: {weight_format!r} is none of {', '.join(WEIGHT_FORMATS)}")
        return cls(
            model=_read_model(fields.child("model")),
            weight_format=weight_format,
            files=_read_files(fields.child("files")),
            source=fields.child("source").strings(),
            tools=fields.child("tools").strings(),
            format_version=version,
        )

    def to_json(self) -> str:
        """The manifest as JSON text with sorted file names and a final newline; `from_json` reads it back."""
        model = {name: getattr(self.model, name) for name in ModelInfo.__slots__}
        document = {
            "format_version": self.format_version,
            "weight_format": self.weight_format,
            "model": model,
            "files": {
                name: {"sha256": record.sha256, "size_bytes": record.size_bytes}
                for name, record in sorted(self.files.items())
            },
            "source": dict(sorted(self.source.items())),
            "tools": dict(sorted(self.tools.items())),
        }
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    def save(self, folder: Path) -> None:
        """Write `manifest.json` into `folder` and flush it to the disk. Raises OSError."""
        with (folder / MANIFEST_NAME).open("w", encoding="utf-8", newline="\n") as file:
            file.write(self.to_json())
            file.flush()
            os.fsync(file.fileno())

    def check_sizes(self, folder: Path) -> None:
        """Compare every file's size with the manifest's. Raises ManifestError naming the first that differs."""
        for name, record in self.files.items():
            try:
                size_bytes = (folder / name).stat().st_size
            except OSError as error:
                raise ManifestError(f"{folder}: {name} cannot be read: {error.strerror}") from error
            if size_bytes != record.size_bytes:
                raise ManifestError(
                    f"{folder}: {name} has {size_bytes} bytes, the manifest says {record.size_bytes}; "
                    "it is damaged or not finished: export the model again"
                )

    def verify_files(self, folder: Path) -> None:
        """Hash every file and compare with the manifest's. Raises ManifestError naming the first that differs."""
        self.check_sizes(folder)
        for name, record in self.files.items():
            try:
                found = FileRecord.of(folder / name)
            except OSError as error:
                raise ManifestError(f"{folder}: {name} cannot be read: {error.strerror}") from error
            if found.sha256 != record.sha256:
                raise ManifestError(
                    f"{folder}: {name} has SHA-256 {found.sha256[:12]}..., the manifest says {record.sha256[:12]}...; "
                    "it is damaged: export the model again"
                )


def _not_a_folder(path: Path) -> str:
    """What is wrong with a path that is no folder."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return f"{path}: no such model folder"
    return _to_be_exported(path, "a GGUF file") if is_gguf else f"{path}: is a file, not a model folder"


def _to_be_exported(path: Path, kind: str) -> str:
    return f"{path}: is {kind}, not a model folder; `chairlift export {path} --out DIR` makes one of it"


def _read_model(fields: JsonObject) -> ModelInfo:
    dimension = partial(fields.integer, minimum=1, maximum=MAX_DIMENSION)
    vocab_size = dimension("vocab_size")
    token_ids = {"maximum": vocab_size - 1}
    return ModelInfo(
        name=fields.string("name"),
        architecture=fields.string("architecture"),
        vocab_size=vocab_size,
        hidden_size=dimension("hidden_size"),
        num_layers=dimension("num_layers"),
        num_heads=dimension("num_heads"),
        num_kv_heads=dimension("num_kv_heads"),
        head_dim=dimension("head_dim"),
        context_length=dimension("context_length"),
        bos_token_id=None if fields.is_null("bos_token_id") else fields.integer("bos_token_id", **token_ids),
        eos_token_ids=fields.integers("eos_token_ids", **token_ids),
        add_bos=fields.boolean("add_bos"),
    )


def _read_files(fields: JsonObject) -> dict[str, FileRecord]:
    files = {}
    for name in fields.names():
        # A name that leaves the folder would make verification read, and later serving map, a stranger's file.
        if name != Path(name).name or name in {"", ".", ".."}:
            raise ManifestError(f"{fields.origin}: {name!r} is not a plain file name")
        record = fields.child(name)
        files[name] = FileRecord(record.string("sha256"), record.integer("size_bytes"))
    return files
