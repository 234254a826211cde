"""Number types of a model on a GPU, by how its weights are stored.

    weights                        activations, logits, norms and biases     KV buffer
    float16                        float16                                   float16, fp8
    int8, int4 of float16          float16                                   float16, fp8
    int8, int4 of anything else    bfloat16                                  bfloat16, fp8
    bfloat16                       bfloat16                                  bfloat16, fp8
    float32, w8a8                  are refused

int8 and int4 are blocks of 32 weights with a scale, which MatMulNBits multiplies. What they were rounded from decides:
only a model that was stored in float16 is known to stay below 65,504 in between. Most are trained in bfloat16, and some
of those, Gemma and Qwen2.5 among them, do not. A GGUF file does not tell, nor does a folder that was exported before
its manifest said so: bfloat16 is right for both, with fewer digits. fp8 is e4m3 without scales: keys and values beyond
448 are cut to it.

Not verified on a card: that ONNX Runtime's CUDA provider has kernels of these types for every op of the graph is known
from the classes in its library (tests/cuda/test_provider_kernels.py), not from running them.
"""

from dataclasses import dataclass
from typing import Final

from graphs.manifest import Manifest
from service.errors import ConfigError
from service.executor.cuda.kernels import SMALLEST_PREFILL, KernelConfig, PrefillShape, Scalar
from service.executor.cuda.launch import BFLOAT16, FLOAT16
from service.executor.kv_layout import KvDtype

_SCALARS: Final = {"float16": Scalar.HALF, "bfloat16": Scalar.BF16}
_BLOCK_FORMATS: Final = ("int8", "int4")
_KV_DTYPES: Final = {Scalar.HALF: KvDtype.FLOAT16, Scalar.BF16: KvDtype.BFLOAT16}
_ELEMENT_TYPES: Final = {Scalar.HALF: FLOAT16, Scalar.BF16: BFLOAT16}


@dataclass(frozen=True, slots=True)
class Precision:
    """What a model computes in and what its KV buffer holds."""

    scalar: Scalar  # of activations and logits: BF16 or HALF
    kv_dtype: KvDtype  # the scalar's, or FP8

    @classmethod
    def choose(cls, kv_dtype: str, manifest: Manifest) -> "Precision":
        """For a model folder and the setting `kv_dtype`. Raises ConfigError for what does not go together."""
        weight_format = manifest.weight_format
        if weight_format in _BLOCK_FORMATS:
            scalar = Scalar.HALF if manifest.source.get("dtype") == "float16" else Scalar.BF16
        elif weight_format in _SCALARS:
            scalar = _SCALARS[weight_format]
        else:
            raise ConfigError(
                f"weight format: {weight_format!r} does not run on cuda: export the model as one of "
                f"{', '.join((*_SCALARS, *_BLOCK_FORMATS))} (--weights)"
            )
        own = _KV_DTYPES[scalar]
        if kv_dtype not in {"auto", own, KvDtype.FP8}:
            weights, allowed = f"{weight_format} weights", f"auto, {own} or {KvDtype.FP8}"
            if weight_format in _BLOCK_FORMATS:
                weights += f" of a model that {'is' if scalar is Scalar.HALF else 'is not'} in float16"
            raise ConfigError(f"kv_dtype: {kv_dtype!r} does not run on cuda with {weights}: {allowed}")
        return cls(scalar, KvDtype.FP8 if kv_dtype == KvDtype.FP8 else own)

    @property
    def element_type(self) -> int:
        """The ONNX element type of activations and logits."""
        return _ELEMENT_TYPES[self.scalar]

    @property
    def is_kv_fp8(self) -> bool:
        """Whether an element of the KV buffer is a byte."""
        return self.kv_dtype is KvDtype.FP8

    def kernel_config(
        self, head_dim: int, block_size: int, tile_tokens: int, prefill: PrefillShape = SMALLEST_PREFILL
    ) -> KernelConfig:
        """What the kernels of such a model are compiled for. Raises ConfigError when there are none."""
        return KernelConfig(self.scalar, head_dim, block_size, tile_tokens, self.scalar, self.is_kv_fp8, prefill)
