"""A Hugging Face folder (config.json, safetensors) as a tensor source: memory-mapped, read when asked for."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from graphs.errors import ExportError
from graphs.fields import Fields
from graphs.rope import Float32Array
from graphs.spec import ModelSpec
from graphs.spec_config import spec_from_config, token_ids
from graphs.tensors import BlockWeights, StoredNames, UInt8Array, check_shapes, require_finite, tensor_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER_NAMES = {
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NAMES = StoredNames(_TOP_NAMES, "model.layers", _LAYER_NAMES, derived=re.compile(r".*\.rotary_emb\.inv_freq"))


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies: bytes [start, end) of a mapped file."""

    file: UInt8Array
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def stored_bytes(self) -> UInt8Array:
        """The tensor as it is in the map."""
        return self.file[self.start : self.end]


class HfSource:
    """Implements TensorSource. Holds the maps open for as long as it lives. Raises ExportError when opened."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Open the folder, describe the model (named after the folder), and check every tensor's presence and shape."""
        self.path = path
        config_path = path / "config.json"
        config = _read_json(config_path)
        eos = _eos_token_ids(path)
        try:
            self.spec: ModelSpec = spec_from_config(config, name or path.resolve().name, eos_token_ids=eos)
        except ExportError as error:
            raise ExportError(f"{config_path}: {error}") from error
        self._tensors = _map_tensors(path)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        try:
            check_shapes(self.spec, shapes, _NAMES)
            self._check_tied_head()
        except ExportError as error:
            raise ExportError(f"{path}: {error}") from error

    @property
    def dtype(self) -> str | None:
        """What all matrices are stored in; None when they differ. Vectors are often wider."""
        shapes = tensor_shapes(self.spec)
        kinds = {self._tensors[self._file_name(name)].dtype for name, shape in shapes.items() if len(shape) == 2}
        return _DTYPE_NAMES.get(kinds.pop()) if len(kinds) == 1 else None

    def float32(self, name: str) -> Float32Array:
        """Yield the tensor as float32; the caller owns it. Raises ExportError."""
        stored_name = self._file_name(name)
        tensor = self._tensors[stored_name]
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ExportError(f"{self.path}: tensor {stored_name}: type {tensor.dtype} is not known: one of {known}")
        values = tensor.stored_bytes().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype == "BF16":  # the upper half of a float32
            widened = (values.astype(np.uint32) << 16).view(np.float32)
        else:
            widened = np.array(values, dtype=np.float32)
        return require_finite(widened, f"{self.path}: tensor {stored_name}")

    def blocks(self, name: str) -> BlockWeights | None:
        """Yield None: these files hold floats."""
        del name
        return None

    def _check_tied_head(self) -> None:
        """Raise ExportError when the file has a head of its own though the model says that it is the embedding."""
        head = self._tensors.get(_TOP_NAMES["head"])
        if head is None or not self.spec.tie_word_embeddings:
            return
        embedding = self._tensors[_TOP_NAMES["embed"]]
        if head.dtype != embedding.dtype or not np.array_equal(head.stored_bytes(), embedding.stored_bytes()):
            raise ExportError("tie_word_embeddings: True is not allowed: lm_head.weight differs from the embedding")

    def _file_name(self, name: str) -> str:
        return _NAMES.stored(name, self.spec)


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ExportError(f"{path} is missing") from error
    except OSError as error:
        raise ExportError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path}: not a JSON object")
    return value


def _eos_token_ids(path: Path) -> tuple[int, ...] | None:
    """What the folder's generation settings end at; None when they don't say. Chat models often list more there."""
    settings = path / "generation_config.json"
    if not settings.is_file():
        return None
    try:
        return token_ids(Fields(_read_json(settings)), "eos_token_id") or None
    except ExportError as error:
        raise ExportError(f"{settings}: {error}") from error


def _map_tensors(path: Path) -> dict[str, _Stored]:
    single, index = path / _SINGLE, path / _INDEX
    if single.is_file():
        return _map_file(single)
    if not index.is_file():
        raise ExportError(f"{path}: neither {_SINGLE} nor {_INDEX} is there")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ExportError(f"{index}: weight_map is not a mapping of tensors to files")
    tensors: dict[str, _Stored] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ExportError(f"{index}: weight_map: {shard!r} is not allowed: a file of the same folder")
        tensors |= _map_file(path / shard)
    return tensors


def _map_file(path: Path) -> dict[str, _Stored]:
    try:
        with safe_open(path, framework="numpy"):
            pass  # the library checks header, ranges and file size; it cannot yield bfloat16 as numpy, hence the map
    except FileNotFoundError as error:
        raise ExportError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path}: not a complete safetensors file: {error}") from error
    file = np.memmap(path, dtype=np.uint8, mode="r")
    data_start = 8 + int.from_bytes(file[:8].tobytes(), "little")
    header = json.loads(file[8:data_start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: _Stored(
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            data_start + entry["data_offsets"][0],
            data_start + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    }
