"""The w8a8 format: each GEMM's input smoothed and rotated, its weights in int8 with one scale per output channel.

The weights are rounded by GPTQ, with the second moments that calibration saw.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from graphs.calibration import RelativeMoments, RelativeRms, calibration_texts
from graphs.decoder_weights import ChannelProjection, Embedding, LayerWeights
from graphs.gptq import round_by_moments, transformed_moments
from graphs.plain_store import to_float16
from graphs.progress import Progress, silent
from graphs.quantize import channel_scales, pack_channels, quantize_channels
from graphs.reference import Array, ReferenceModel
from graphs.rope import Float32Array, Float64Array
from graphs.rotation import rotate_channels, rotation_block
from graphs.smoothing import (
    EXPONENTS,
    channel_max,
    repeated_for_query_heads,
    shared_by_query_heads,
    smoothing_factors,
)
from graphs.tensors import TensorSource
from graphs.weight_file import WeightFile


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration saw at each GEMM's input, by its name: "layers.I.qkv", ..., "head"."""

    relative_rms: Mapping[str, Float64Array]  # [in_features]
    second_moments: Mapping[str, Float32Array]  # [in_features, in_features] sum; none: round to nearest


def calibrate(source: TensorSource, tokenizer_path: Path, progress: Progress = silent) -> Calibration:
    """Watch what each GEMM reads over the texts that ship with the package, computed in float32.

    Holds the whole model in float32 and, for each GEMM, a matrix as wide as its input. Raises ExportError.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    texts = calibration_texts()
    model = ReferenceModel(source, np.float32)
    relative_rms, moments = RelativeRms(), RelativeMoments()

    def observe(name: str, x: Array) -> None:
        relative_rms(name, x)
        moments(name, x)

    for index, text in enumerate(texts):
        progress("calibrating", index, len(texts))
        token_ids = list(tokenizer.encode(text).ids)[: source.spec.context_length]
        if token_ids:
            model.final_hidden(token_ids, observe=observe)
    progress("calibrating", len(texts), len(texts))
    return Calibration(relative_rms.result(), moments.result())


@dataclass(frozen=True, slots=True)
class SmoothedWeight:
    """A GEMM's weight multiplied by its smoothing `factors` [in_features]; not rotated yet."""

    weight: Float32Array
    factors: Float32Array
    bias: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class SmoothedLayer:
    """One layer's weights, with every factor divided out of what writes its GEMM's input."""

    norm1: Float32Array
    qkv: SmoothedWeight
    o: SmoothedWeight
    norm2: Float32Array
    gate_up: SmoothedWeight
    down: SmoothedWeight


class ChannelStore:
    """Smooths, rotates and quantises each projection; a `WeightStore`."""

    def __init__(self, source: TensorSource, file: WeightFile, calibration: Calibration) -> None:
        """Read from `source`, write to `file`."""
        self._source = source
        self._file = file
        self._calibration = calibration

    def embedding(self) -> Embedding:
        """A float16 table: its rows are read as they are, and the head has a copy of its own."""
        return Embedding(self._file.add("embed", to_float16("embed", self._source.float32("embed"))))

    def layer(self, index: int) -> LayerWeights:
        """One layer; gate and up are stacked, since the op that gates them reads them side by side."""
        spec, prefix, add = self._source.spec, f"layers.{index}", self._file.add
        smoothed = self.smoothed_layer(prefix)
        names = [f"{prefix}.{part}" for part in ("q_norm", "k_norm")] if spec.has_qk_norm else []
        q_norm, k_norm = [add(name, self._source.float32(name)) for name in names] or (None, None)
        return LayerWeights(
            norm1=add(f"{prefix}.norm1", smoothed.norm1),
            qkv=self._project(f"{prefix}.qkv", smoothed.qkv),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._project(f"{prefix}.o", smoothed.o, is_rotated=False),
            norm2=add(f"{prefix}.norm2", smoothed.norm2),
            gate_up=(self._project(f"{prefix}.gate_up", smoothed.gate_up),),
            down=self._project(f"{prefix}.down", smoothed.down),
        )

    def head(self) -> tuple[str, ChannelProjection]:
        """The final norm and the head's own smoothed copy."""
        head = self._smoothed("head", "head", self._source.float32("head"))
        norm = self._file.add("final_norm", self._source.float32("final_norm") / head.factors)
        return norm, self._project("head", head)

    def smoothed_layer(self, prefix: str) -> SmoothedLayer:
        """Read one layer and fold its factors: of o into v's rows, of down into up's rows, the rest into the norms."""
        spec = self._source.spec

        def read(*parts: str) -> Float32Array:
            return np.concatenate([self._source.float32(f"{prefix}.{part}") for part in parts])

        down = self._smoothed(f"{prefix}.down", "down", read("down"))
        gate_up_weight = read("gate", "up")
        gate_up_weight[spec.intermediate_size :] /= down.factors[:, None]

        o, value_factors = self._smoothed_o(prefix, read("o"), read("o.bias") if spec.has_o_bias else None)
        qkv_weight = read("q", "k", "v")
        qkv_weight[-spec.kv_size :] /= value_factors[:, None]
        bias = read("q.bias", "k.bias", "v.bias") if spec.has_qkv_bias else None
        if bias is not None:
            bias[-spec.kv_size :] /= value_factors

        qkv = self._smoothed(f"{prefix}.qkv", "qkv", qkv_weight, bias)
        gate_up = self._smoothed(f"{prefix}.gate_up", "gate_up", gate_up_weight)
        return SmoothedLayer(read("norm1") / qkv.factors, qkv, o, read("norm2") / gate_up.factors, gate_up, down)

    def _smoothed(self, gemm: str, kind: str, weight: Float32Array, bias: Float32Array | None = None) -> SmoothedWeight:
        """Multiply `weight`, in place, by the factors of its input channels."""
        relative_rms = self._calibration.relative_rms[gemm]
        factors = smoothing_factors(relative_rms, channel_max(weight), EXPONENTS[kind])
        weight *= factors
        return SmoothedWeight(weight, factors, bias)

    def _smoothed_o(
        self, prefix: str, weight: Float32Array, bias: Float32Array | None
    ) -> tuple[SmoothedWeight, Float32Array]:
        """The same for o, whose factors must be one per value channel: yield these too, [num_kv_heads * head_dim]."""
        spec = self._source.spec
        relative_rms = self._calibration.relative_rms[f"{prefix}.o"]
        value_factors = smoothing_factors(
            shared_by_query_heads(relative_rms, spec.num_kv_heads, spec.head_dim),
            shared_by_query_heads(channel_max(weight), spec.num_kv_heads, spec.head_dim),
            EXPONENTS["o"],
        )
        factors = repeated_for_query_heads(value_factors, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        weight *= factors
        return SmoothedWeight(weight, factors, bias), value_factors

    def _project(self, name: str, smoothed: SmoothedWeight, *, is_rotated: bool = True) -> ChannelProjection:
        add = self._file.add
        block = rotation_block(smoothed.weight.shape[1]) if is_rotated else 0
        weight = rotate_channels(smoothed.weight, block)
        moments = self._calibration.second_moments.get(name)
        if moments is None:
            stored = quantize_channels(weight)
        else:
            scale = channel_scales(weight)
            values = round_by_moments(weight, scale, transformed_moments(moments, smoothed.factors, block))
            stored = pack_channels(values, scale)
        return ChannelProjection(
            out_features=weight.shape[0],
            panels=add(name, stored.panels),
            col_scale=add(f"{name}.col_scale", stored.col_scale),
            col_sum=add(f"{name}.col_sum", stored.col_sum),
            bias=None if smoothed.bias is None else add(f"{name}.bias", smoothed.bias),
        )
