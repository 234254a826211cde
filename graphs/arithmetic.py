"""How a decoder's blocks compute: in floats, or in integers with one scale per token.

Both are written as the same steps around the GEMMs, so that `layers` describes each block once:

    step        float arithmetic                       integer arithmetic (w8a8)
    norm        RMSNormalization                       RmsNormLinear
    activate    nothing                                QuantizedLinear
    project     Gemm or MatMulNBits                    the op of the step before
    gate        silu(gate) * up                        SwiGluLinear
    add_norm    SkipSimplifiedLayerNormalization       AddRmsNormLinear

In integer arithmetic the GEMM that reads a step's rows computes them itself: int8 rows are never in the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto

from graphs.decoder_weights import BlockProjection, ChannelProjection, FloatProjection, Projection
from graphs.graph_builder import CHAIRLIFT, MICROSOFT, Dim, GraphBuilder, Value, floats, int64s
from graphs.rotation import rotation_block
from graphs.tensors import BLOCK_SIZE

_ACCURACY_LEVEL: Final = 4  # int8 activations inside MatMulNBits, its only fast path on a CPU


@dataclass(frozen=True, slots=True)
class FusedStep:
    """A step that the one GEMM that reads its rows does by itself."""

    op_type: str
    inputs: Sequence[str]  # ahead of the weights
    attributes: Mapping[str, float | int]
    outputs: Sequence[Value] = ()  # behind the product


@dataclass(frozen=True, slots=True)
class Rows:
    """A value [rows, width] on its way between two steps."""

    name: str  # float32; "" where `fused` says how it will come about
    rows: Dim
    width: int
    fused: FusedStep | None = None


class FloatArithmetic:
    """Float32 activations; weights in float32, in 16 bits (cast once, at loading), or blocks of integers."""

    def __init__(self, builder: GraphBuilder, epsilon: float) -> None:
        """`epsilon` is that of the norms."""
        self._builder = builder
        self._epsilon = epsilon
        self._block_sums: dict[str, str] = {}  # of each GEMM input, shared by all GEMMs that read it

    def norm(self, name: str, residual: Rows, weight: str) -> Rows:
        """The RMS norm of the residual stream."""
        out = floats(f"{name}/out", residual.rows, residual.width)
        inputs = [residual.name, self._builder.weight(weight)]
        self._builder.node("RMSNormalization", inputs, out, axis=-1, epsilon=self._epsilon)
        return Rows(out.name, residual.rows, residual.width)

    def activate(self, name: str, x: Rows) -> Rows:
        """Floats are what projections read."""
        del name
        return x

    def project(self, name: str, x: Rows, projection: Projection) -> Rows:
        """x W^T + bias."""
        match projection:
            case FloatProjection():
                return self._float(name, x, projection)
            case BlockProjection():
                return self._blocks(name, x, projection)
            case ChannelProjection():
                raise TypeError("per-channel integer weights need integer arithmetic")

    def gate(self, name: str, x: Rows, projections: Sequence[Projection]) -> Rows:
        """silu(gate) * up, each from its own projection of `x`."""
        gate = self.project(f"{name}/gate", x, projections[0])
        up = self.project(f"{name}/up", x, projections[1])
        # With alpha 1 QuickGelu is x * sigmoid(x), in one pass.
        silu = floats(f"{name}/silu", x.rows, gate.width)
        self._builder.node("QuickGelu", [gate.name], silu, domain=MICROSOFT, alpha=1.0)
        out = floats(f"{name}/gated", x.rows, gate.width)
        self._builder.node("Mul", [silu.name, up.name], out)
        return Rows(out.name, x.rows, gate.width)

    def add_norm(self, name: str, residual: Rows, summand: Rows, weight: str) -> tuple[Rows, Rows]:
        """Add to the residual stream; yield it and its norm."""
        shape = (residual.rows, residual.width)
        total, out = floats(f"{name}/residual", *shape), floats(f"{name}/out", *shape)
        self._builder.node(
            "SkipSimplifiedLayerNormalization",
            [residual.name, summand.name, self._builder.weight(weight)],
            out,
            None,
            None,
            total,
            domain=MICROSOFT,
            epsilon=self._epsilon,
        )
        return Rows(total.name, *shape), Rows(out.name, *shape)

    def _float(self, name: str, x: Rows, projection: FloatProjection) -> Rows:
        builder = self._builder
        weight = builder.weight(projection.weight)
        if builder.weight_type(weight) != TensorProto.FLOAT:
            wide = floats(f"{name}/weight", projection.out_features, x.width)
            weight = builder.node("Cast", [weight], wide, to=TensorProto.FLOAT)
        out = floats(f"{name}/out", x.rows, projection.out_features)
        bias = [builder.weight(projection.bias)] if projection.bias else []
        builder.node("Gemm", [x.name, weight, *bias], out, transB=1)
        return Rows(out.name, x.rows, projection.out_features)

    def _blocks(self, name: str, x: Rows, projection: BlockProjection) -> Rows:
        builder = self._builder
        zero_points = builder.weight(projection.zero_points) if projection.zero_points else ""
        bias = builder.weight(projection.bias) if projection.bias else ""
        inputs = [x.name, builder.weight(projection.packed), builder.weight(projection.scales), zero_points, "", bias]
        while not inputs[-1]:
            inputs.pop()
        shape = (x.rows, projection.out_features)
        product = floats(f"{name}/codes" if projection.correction else f"{name}/out", *shape)
        builder.node(
            "MatMulNBits",
            inputs,
            product,
            domain=MICROSOFT,
            K=projection.in_features,
            N=projection.out_features,
            bits=projection.bits,
            block_size=BLOCK_SIZE,
            accuracy_level=_ACCURACY_LEVEL,
        )
        if projection.correction:
            out = floats(f"{name}/out", *shape)
            builder.node("Gemm", [self._sums(x), builder.weight(projection.correction), product.name], out)
            return Rows(out.name, *shape)
        return Rows(product.name, *shape)

    def _sums(self, x: Rows) -> str:
        """The sum of each block of 32 channels of `x`: [rows, width / 32]."""
        if x.name not in self._block_sums:
            builder = self._builder
            num_blocks = x.width // BLOCK_SIZE
            shape = builder.constant(f"shape.0x{num_blocks}x{BLOCK_SIZE}", int64s(0, num_blocks, BLOCK_SIZE))
            blocks = floats(f"{x.name}.blocks", x.rows, num_blocks, BLOCK_SIZE)
            builder.node("Reshape", [x.name, shape], blocks)
            sums = floats(f"{x.name}.block_sums", x.rows, num_blocks)
            builder.node("ReduceSum", [blocks.name, builder.constant("axis.2", int64s(2))], sums, keepdims=0)
            self._block_sums[x.name] = sums.name
        return self._block_sums[x.name]


class IntegerArithmetic:
    """GEMMs of uint8 activations, one scale and zero point per token, with int8 weights, one scale per channel.

    What a rotated projection reads is rotated before it is quantised, in blocks of `rotation_block(width)`.
    """

    def __init__(self, builder: GraphBuilder, epsilon: float) -> None:
        """`epsilon` is that of the norms."""
        self._builder = builder
        self._epsilon = epsilon

    def norm(self, name: str, residual: Rows, weight: str) -> Rows:
        """The RMS norm of the residual stream, rotated."""
        del name
        inputs = [residual.name, self._builder.weight(weight)]
        step = FusedStep("RmsNormLinear", inputs, self._norm_attributes(residual.width))
        return Rows("", residual.rows, residual.width, step)

    def activate(self, name: str, x: Rows) -> Rows:
        """Attention's output as it is; it is even enough without a rotation."""
        del name
        return Rows("", x.rows, x.width, FusedStep("QuantizedLinear", [x.name], {"rotation": 0}))

    def project(self, name: str, x: Rows, projection: Projection) -> Rows:
        """x W^T + bias, in floats, after the step that `x` comes from."""
        if not isinstance(projection, ChannelProjection):
            raise TypeError("integer arithmetic needs per-channel integer weights")
        if x.fused is None:
            raise TypeError(f"{name}: {x.name} comes from no step that a GEMM can do")
        names = [projection.panels, projection.col_scale, projection.col_sum]
        names += [projection.bias] if projection.bias else []
        out = floats(f"{name}/out", x.rows, projection.out_features)
        inputs = [*x.fused.inputs, *map(self._builder.weight, names)]
        self._builder.node(x.fused.op_type, inputs, out, *x.fused.outputs, domain=CHAIRLIFT, **x.fused.attributes)
        return Rows(out.name, x.rows, projection.out_features)

    def gate(self, name: str, x: Rows, projections: Sequence[Projection]) -> Rows:
        """silu(gate) * up of one stacked projection, rotated."""
        (projection,) = projections
        product = self.project(f"{name}/gate_up", x, projection)
        width = product.width // 2
        step = FusedStep("SwiGluLinear", [product.name], {"rotation": rotation_block(width)})
        return Rows("", x.rows, width, step)

    def add_norm(self, name: str, residual: Rows, summand: Rows, weight: str) -> tuple[Rows, Rows]:
        """Add to the residual stream; yield it and its norm, rotated. The sum is there after the norm's projection."""
        shape = (residual.rows, residual.width)
        total = floats(f"{name}/residual", *shape)
        inputs = [residual.name, summand.name, self._builder.weight(weight)]
        step = FusedStep("AddRmsNormLinear", inputs, self._norm_attributes(residual.width), [total])
        return Rows(total.name, *shape), Rows("", *shape, step)

    def _norm_attributes(self, width: int) -> dict[str, float | int]:
        return {"epsilon": self._epsilon, "rotation": rotation_block(width)}


Arithmetic = FloatArithmetic | IntegerArithmetic
