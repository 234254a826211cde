"""Turns a model's file into a model folder: graphs, weights, tokenizer, manifest, all verified."""

from dataclasses import dataclass
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import onnx

from graphs.channel_store import ChannelStore, calibrate
from graphs.decoder import GraphKind, build_decoder
from graphs.decoder_weights import WeightStore, store_decoder
from graphs.errors import ExportError
from graphs.exportable import require_exportable, require_memory, require_utf8
from graphs.fingerprint import source_fingerprint, source_name
from graphs.gguf_tokenizer import write_tokenizer
from graphs.manifest import (
    CHAT_TEMPLATE_NAME,
    DECODE_NAME,
    PREFILL_NAME,
    REQUIRED_FILES,
    TOKENIZER_NAME,
    WEIGHT_FORMATS,
    WEIGHTS_NAME,
    FileRecord,
    Manifest,
    ModelInfo,
)
from graphs.plain_store import PlainStore
from graphs.progress import Progress, silent
from graphs.spec import ModelSpec
from graphs.staging import publish, require_replaceable, staging_folder
from graphs.tensors import TensorSource
from graphs.verify import Verification, verify_export
from graphs.weight_file import WeightFile
from graphs.weights import open_source

_TOOLS: Final = ("chairlift", "onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "gguf", "tokenizers")
_GRAPH_FILES: Final[dict[GraphKind, str]] = {"prefill": PREFILL_NAME, "decode": DECODE_NAME}


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote and how near it is to its source."""

    folder: Path
    manifest: Manifest
    verification: Verification


def export_model(
    source: str | Path,
    out: Path,
    weight_format: str = "w8a8",
    *,
    overwrite: bool = False,
    progress: Progress = silent,
    available_memory_bytes: int | None = None,
) -> ExportResult:
    """Export `source` (a GGUF file, a Hugging Face folder or a hub id) into the folder `out`, verified.

    Everything is written into a hidden folder beside `out` that is renamed at the end, so `out` is complete or as it
    was. With `overwrite` an existing model folder is replaced; any other folder that is not empty never is.

    Raises ExportError when the source cannot be exported, or not in `available_memory_bytes`, when `out` is in the way
    or somebody else is writing it, or when the graphs fail verification.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ExportError(f"weight format: {weight_format!r} is not allowed: one of {', '.join(WEIGHT_FORMATS)}")
    require_replaceable(out, overwrite)
    opened = open_source(source)
    origin = {"name": source_name(opened.path), "fingerprint": source_fingerprint(opened.path)}
    for field, name in (("source", origin["name"]), ("name", opened.spec.name), ("out", str(out.resolve()))):
        require_utf8(field, name)
    require_exportable(opened.spec, weight_format)
    if available_memory_bytes is not None:
        require_memory(opened.spec, weight_format, available_memory_bytes)
    with staging_folder(out) as folder:
        tokenizer = write_tokenizer(opened.path, folder)
        if tokenizer.vocab_size > opened.spec.vocab_size:
            raise ExportError(
                f"{source}: the tokenizer's largest id {tokenizer.vocab_size - 1} is not allowed: "
                f"the model has the ids 0 to {opened.spec.vocab_size - 1}"
            )
        write_graphs(opened, folder, weight_format, progress)
        progress("verifying", 0, 1)
        verification = verify_export(folder, opened, weight_format)
        progress("verifying", 1, 1)
        if source_fingerprint(opened.path) != origin["fingerprint"]:
            raise ExportError(f"{source}: has changed while it was exported")
        manifest = _describe(opened, origin, folder, weight_format, add_bos=tokenizer.add_bos)
        manifest.save(folder)
        publish(folder, out, overwrite)
    return ExportResult(out, manifest, verification)


def write_graphs(source: TensorSource, folder: Path, weight_format: str, progress: Progress = silent) -> None:
    """Write weights.bin, prefill.onnx and decode.onnx into `folder`, which holds the tokenizer. Raises ExportError."""
    spec = source.spec
    num_parts = spec.num_layers + 2
    num_done = 0

    def advance() -> None:
        nonlocal num_done
        num_done += 1
        progress("writing weights", num_done, num_parts)

    with WeightFile(folder / WEIGHTS_NAME) as file:
        store: WeightStore
        if weight_format == "w8a8":
            store = ChannelStore(source, file, calibrate(source, folder / TOKENIZER_NAME, progress))
        else:
            store = PlainStore(source, file, weight_format)
        weights = store_decoder(source, store, file, advance)
        for kind, name in _GRAPH_FILES.items():
            onnx.save(build_decoder(kind, spec, weights, file), folder / name)
    for name in _GRAPH_FILES.values():
        onnx.checker.check_model(str(folder / name))


def _describe(
    source: TensorSource, origin: dict[str, str], folder: Path, weight_format: str, *, add_bos: bool
) -> Manifest:
    names = [*REQUIRED_FILES, *([CHAT_TEMPLATE_NAME] if (folder / CHAT_TEMPLATE_NAME).is_file() else [])]
    if source.dtype:
        origin = origin | {"dtype": source.dtype}
    if source.path.is_file():
        with source.path.open("rb") as file:
            origin = origin | {"sha256": file_digest(file, "sha256").hexdigest()}
    return Manifest(
        model=model_info(source.spec, add_bos=add_bos),
        weight_format=weight_format,
        files={name: FileRecord.of(folder / name) for name in names},
        source=origin,
        tools=_tool_versions(),
    )


def model_info(spec: ModelSpec, *, add_bos: bool) -> ModelInfo:
    """What the manifest says of a model. `add_bos`: whether its tokenizer begins prompts with the BOS token."""
    return ModelInfo(
        name=spec.name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        context_length=spec.context_length,
        bos_token_id=spec.bos_token_id,
        eos_token_ids=spec.eos_token_ids,
        add_bos=add_bos,
    )


def _tool_versions() -> dict[str, str]:
    versions = {}
    for tool in _TOOLS:
        try:
            versions[tool] = version(tool)
        except PackageNotFoundError:
            continue
    return versions
