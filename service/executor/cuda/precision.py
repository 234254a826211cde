"""Number types of a model on a GPU, by how its weights are stored.

    weights                      activations, logits, norms and biases     KV buffer
    float16, int8, int4          float16                                   float16, fp8
    bfloat16                     bfloat16                                  bfloat16, fp8
    float32, w8a8                are refused

int8 and int4 are blocks of 32 weights with a scale, which MatMulNBits multiplies. fp8 is e4m3 without scales: keys and
values beyond 448 are cut to it.

Not verified on a card: that ONNX Runtime's CUDA provider has kernels of these types for every op of the graph is known
from the classes in its library (tests/cuda/test_provider_kernels.py), not from running them.
"""

from dataclasses import dataclass
from typing import Final

from service.errors import ConfigError
from service.executor.cuda.kernels import KernelConfig, Scalar
from service.executor.cuda.launch import BFLOAT16, FLOAT16
from service.executor.kv_layout import KvDtype

_SCALARS: Final = {"float16": Scalar.HALF, "bfloat16": Scalar.BF16, "int8": Scalar.HALF, "int4": Scalar.HALF}
_KV_DTYPES: Final = {Scalar.HALF: KvDtype.FLOAT16, Scalar.BF16: KvDtype.BFLOAT16}
_ELEMENT_TYPES: Final = {Scalar.HALF: FLOAT16, Scalar.BF16: BFLOAT16}


@dataclass(frozen=True, slots=True)
class Precision:
    """What a model computes in and what its KV buffer holds."""

    scalar: Scalar  # of activations and logits: BF16 or HALF
    kv_dtype: KvDtype  # the scalar's, or FP8

    @classmethod
    def choose(cls, kv_dtype: str, weight_format: str) -> "Precision":
        """For a model folder's weights and the setting `kv_dtype`. Raises ConfigError for what does not go together."""
        scalar = _SCALARS.get(weight_format)
        if scalar is None:
            raise ConfigError(
                f"weight format: {weight_format!r} does not run on cuda: export the model as one of "
                f"{', '.join(_SCALARS)} (--weights)"
            )
        own = _KV_DTYPES[scalar]
        if kv_dtype not in {"auto", own, KvDtype.FP8}:
            allowed = f"auto, {own} or {KvDtype.FP8}"
            raise ConfigError(f"kv_dtype: {kv_dtype!r} does not run on cuda with {weight_format} weights: {allowed}")
        return cls(scalar, KvDtype.FP8 if kv_dtype == KvDtype.FP8 else own)

    @property
    def element_type(self) -> int:
        """The ONNX element type of activations and logits."""
        return _ELEMENT_TYPES[self.scalar]

    @property
    def is_kv_fp8(self) -> bool:
        """Whether an element of the KV buffer is a byte."""
        return self.kv_dtype is KvDtype.FP8

    def kernel_config(self, head_dim: int, block_size: int, tile_tokens: int) -> KernelConfig:
        """What the kernels of such a model are compiled for. Raises ConfigError when there are none."""
        return KernelConfig(self.scalar, head_dim, block_size, tile_tokens, self.is_kv_fp8, logit=self.scalar)
