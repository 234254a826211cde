"""The formats that leave the model's arithmetic as it is: floats of 32 and 16 bits, int8 and int4 blocks."""

from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphs.decoder_weights import (
    BlockProjection,
    Embedding,
    FloatProjection,
    LayerWeights,
    Projection,
)
from graphs.errors import ExportError
from graphs.quantize import pack_blocks, quantize_blocks, stack_blocks, zero_points_of
from graphs.rope import Float32Array
from graphs.tensors import BlockWeights, TensorSource
from graphs.weight_file import WeightFile

MAX_BFLOAT16: Final = (2 - 2**-7) * 2.0**127
_BITS: Final = {"int4": 4, "int8": 8}


def to_float16(name: str, tensor: Float32Array) -> NDArray[np.float16]:
    """Round to float16. Raises ExportError when a value is too large for it."""
    limit = float(np.finfo(np.float16).max)
    largest = float(np.abs(tensor).max(initial=0.0))
    if largest > limit:
        raise ExportError(f"{name}: {largest:g} is not allowed: float16 holds at most {limit:g}")
    return tensor.astype(np.float16)


def to_bfloat16(name: str, tensor: Float32Array) -> NDArray[ml_dtypes.bfloat16]:
    """Round to bfloat16. Raises ExportError when a value is too large for it."""
    stored = tensor.astype(ml_dtypes.bfloat16)
    if not np.isfinite(stored).all():
        raise ExportError(f"{name}: {np.abs(tensor).max():g} is not allowed: bfloat16 holds at most {MAX_BFLOAT16:g}")
    return stored


_NARROWING: Final = {"float16": to_float16, "bfloat16": to_bfloat16}


class PlainStore:
    """Stores each projection as it is, or on blocks of 32; a `WeightStore`."""

    def __init__(self, source: TensorSource, file: WeightFile, weight_format: str) -> None:
        """`weight_format` is float32, float16, bfloat16, int8 or int4."""
        self._source = source
        self._file = file
        self._format = weight_format
        self._shared_head: Projection | None = None

    def embedding(self) -> Embedding:
        """The table; for block formats on the tied head's own 8-bit grid where there is one, else in float16."""
        spec = self._source.spec
        if self._format in _BITS:
            if spec.tie_word_embeddings:
                head = self._blocks("head", ["embed"], None)
                self._shared_head = head
                if head.bits == 8 and head.zero_points is None and head.correction is None:
                    codes = self._file.alias("embed", head.packed, (spec.vocab_size, spec.hidden_size))
                    return Embedding(codes, head.scales)
            return Embedding(self._file.add("embed", to_float16("embed", self._source.float32("embed"))))
        if spec.tie_word_embeddings:
            table = self._float("embed", ["embed"], None)
            self._shared_head = table
            return Embedding(table.weight)
        return Embedding(self._float("embed", ["embed"], None).weight)

    def layer(self, index: int) -> LayerWeights:
        """One layer; gate and up stay apart, so that no graph must split their product."""
        spec, prefix = self._source.spec, f"layers.{index}"
        qkv = [f"{prefix}.{part}" for part in "qkv"]
        return LayerWeights(
            norm1=self._vector(f"{prefix}.norm1"),
            qkv=self._project(f"{prefix}.qkv", qkv, spec.has_qkv_bias),
            q_norm=self._vector(f"{prefix}.q_norm") if spec.has_qk_norm else None,
            k_norm=self._vector(f"{prefix}.k_norm") if spec.has_qk_norm else None,
            o=self._project(f"{prefix}.o", [f"{prefix}.o"], spec.has_o_bias),
            norm2=self._vector(f"{prefix}.norm2"),
            gate_up=tuple(self._project(f"{prefix}.{part}", [f"{prefix}.{part}"]) for part in ("gate", "up")),
            down=self._project(f"{prefix}.down", [f"{prefix}.down"]),
        )

    def head(self) -> tuple[str, Projection]:
        """The final norm and the head, which `embedding` has stored already when it is tied."""
        return self._vector("final_norm"), self._shared_head or self._project("head", ["head"])

    def _vector(self, name: str) -> str:
        return self._file.add(name, self._source.float32(name))

    def _project(self, name: str, parts: list[str], has_bias: bool = False) -> Projection:
        bias = None
        if has_bias:
            biases = [self._source.float32(f"{part}.bias") for part in parts]
            bias = self._file.add(f"{name}.bias", np.concatenate(biases))
        return self._blocks(name, parts, bias) if self._format in _BITS else self._float(name, parts, bias)

    def _float(self, name: str, parts: list[str], bias: str | None) -> FloatProjection:
        weight = np.concatenate([self._source.float32(part) for part in parts])
        narrowing = _NARROWING.get(self._format)
        stored = weight if narrowing is None else narrowing(name, weight)
        return FloatProjection(weight.shape[0], self._file.add(name, stored), bias)

    def _blocks(self, name: str, parts: list[str], bias: str | None) -> BlockProjection:
        blocks = stack_blocks([self._grid(part) for part in parts])
        out_features, in_features = blocks.codes.shape
        weights = pack_blocks(blocks)
        add = self._file.add
        zero_points, correction = weights.zero_points, weights.correction
        return BlockProjection(
            out_features,
            in_features,
            weights.bits,
            packed=add(name, weights.packed),
            scales=add(f"{name}.scales", weights.scales),
            zero_points=None if zero_points is None else add(f"{name}.zero_points", zero_points),
            correction=None if correction is None else add(f"{name}.correction", correction),
            bias=bias,
        )

    def _grid(self, name: str) -> BlockWeights:
        """The file's own grid where the format holds it; else a new one.

        int4 keeps any grid: an 8-bit matrix in a 4-bit file was left so on purpose. int8 keeps those that need no
        correction: beside 8-bit rounding of a coarser grid a correction GEMM is not worth its time.
        """
        bits = _BITS[self._format]
        blocks = self._source.blocks(name)
        if blocks is not None and (bits == 4 or zero_points_of(blocks) is not None):
            return BlockWeights(max(bits, blocks.bits), blocks.codes, blocks.scales, blocks.offsets)
        return quantize_blocks(self._source.float32(name), bits)
