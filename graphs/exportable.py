"""What an export asks of a model and of the machine: checked at its start, since finding out later takes minutes."""

import math
from typing import Final

from graphs.encoding import is_utf8
from graphs.errors import ExportError
from graphs.op_twins_rows import MAX_QUANTIZED_WIDTH
from graphs.spec import ModelSpec
from graphs.tensors import BLOCK_SIZE, tensor_shapes
from graphs.verify import MIN_CONTEXT_LENGTH

_HEAD_DIM_STEP: Final = 8  # the attention kernels take eight dimensions at a time
_GIB: Final = 1 << 30


def require_exportable(spec: ModelSpec, weight_format: str) -> None:
    """Raise ExportError, naming field, value and limit, when no graph of `weight_format` can compute the model."""
    if spec.head_dim % _HEAD_DIM_STEP:
        raise ExportError(f"head_dim: {spec.head_dim} is not allowed: a multiple of {_HEAD_DIM_STEP}")
    if spec.context_length < MIN_CONTEXT_LENGTH:
        raise ExportError(
            f"context_length: {spec.context_length} is too short to verify the graphs: at least {MIN_CONTEXT_LENGTH}"
        )
    widths = {
        "hidden_size": spec.hidden_size,
        "num_heads * head_dim": spec.q_size,
        "intermediate_size": spec.intermediate_size,
    }
    for field, width in widths.items():
        if weight_format == "w8a8" and width > MAX_QUANTIZED_WIDTH:
            raise ExportError(f"{field}: {width} is not allowed: at most {MAX_QUANTIZED_WIDTH} for w8a8")
        if weight_format in ("int8", "int4") and width % BLOCK_SIZE:
            raise ExportError(f"{field}: {width} is not allowed: a multiple of {BLOCK_SIZE} for {weight_format}")


def require_utf8(field: str, name: str) -> None:
    """Raise ExportError when a name or path cannot be written into graphs, or handed to libraries."""
    if not is_utf8(name):
        raise ExportError(f"{field}: {name!r} is not allowed: UTF-8 only")


def require_memory(spec: ModelSpec, weight_format: str, available_bytes: int) -> None:
    """Raise ExportError when the export needs more than `available_bytes` of memory."""
    needed = needed_memory_bytes(spec, weight_format)
    if needed > available_bytes:
        raise ExportError(
            f"memory: an export to {weight_format} needs about {needed / _GIB:.1f} GiB, "
            f"{available_bytes / _GIB:.1f} GiB are free"
        )


def needed_memory_bytes(spec: ModelSpec, weight_format: str) -> int:
    """About what an export holds at its largest, without the files that it maps.

    Verification holds two layers at a time in float64, beside the embedding and the head. The calibration of w8a8 holds
    the model in float32 and, for each GEMM, a float32 matrix as wide as its input.
    """
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    total = sum(sizes.values())
    one_layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    verified = 8 * (total - max(spec.num_layers - 2, 0) * one_layer)
    if weight_format != "w8a8":
        return verified
    per_layer = 2 * spec.hidden_size**2 + spec.q_size**2 + spec.intermediate_size**2
    return max(verified, 4 * (total + spec.num_layers * per_layer + spec.hidden_size**2))
