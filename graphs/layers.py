"""The blocks of a decoder as sub-graphs: embedding, attention, MLP. Any arithmetic."""

from dataclasses import dataclass
from typing import NamedTuple

from onnx import TensorProto

from graphs.arithmetic import Arithmetic, Rows
from graphs.decoder_weights import DecoderWeights, Embedding, LayerWeights
from graphs.graph_builder import CHAIRLIFT, MICROSOFT, Dim, GraphBuilder, Value, floats
from graphs.spec import ModelSpec
from graphs.tensors import BLOCK_SIZE


class StepInputs(NamedTuple):
    """Names of the values that every attention op reads, in the op's order after `qkv` and `kv_cache`."""

    cu_seqlens: str
    context_lens: str
    block_table: str
    slot_mapping: str
    positions: str
    cos: str
    sin: str
    workspace: str


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What the blocks of one graph share."""

    builder: GraphBuilder
    arithmetic: Arithmetic
    spec: ModelSpec
    weights: DecoderWeights
    inputs: StepInputs


def embed(builder: GraphBuilder, embedding: Embedding, token_ids: str, num_tokens: Dim, width: int) -> Rows:
    """The embeddings of `token_ids`. Rows are gathered before they are widened, so the table stays in mapped pages."""
    out = floats("embedding/out", num_tokens, width)
    table = builder.weight(embedding.table)
    if embedding.scales is not None:
        builder.node(
            "GatherBlockQuantized",
            [table, token_ids, builder.weight(embedding.scales)],
            out,
            domain=MICROSOFT,
            bits=8,
            block_size=BLOCK_SIZE,
            gather_axis=0,
            quantize_axis=1,
        )
    elif (stored_type := builder.weight_type(table)) != TensorProto.FLOAT:
        narrow = Value("embedding/narrow", stored_type, (num_tokens, width))
        builder.node("Gather", [table, token_ids], narrow, axis=0)
        builder.node("Cast", [narrow.name], out, to=TensorProto.FLOAT)
    else:
        builder.node("Gather", [table, token_ids], out, axis=0)
    return Rows(out.name, num_tokens, width)


def take_rows(builder: GraphBuilder, name: str, x: Rows, indices: str, num_rows: Dim) -> Rows:
    """The rows `indices` int32[num_rows] of the float value `x`."""
    out = floats(name, num_rows, x.width)
    builder.node("Gather", [x.name, indices], out, axis=0)
    return Rows(out.name, num_rows, x.width)


def attention(context: BlockContext, name: str, layer: LayerWeights, x: Rows, kv_cache: str) -> Rows:
    """Queries, keys and values of `x`; then RoPE, the write into `kv_cache` and paged attention, as one op."""
    builder, spec, arithmetic = context.builder, context.spec, context.arithmetic
    qkv = arithmetic.project(f"{name}/qkv", x, layer.qkv)
    norms = [builder.weight(norm) for norm in (layer.q_norm, layer.k_norm) if norm is not None]
    out = floats(f"{name}/attended", x.rows, spec.q_size)
    builder.node(
        "PagedAttention",
        [qkv.name, kv_cache, *context.inputs, *norms],
        out,
        domain=CHAIRLIFT,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.attention_scale,
        sliding_window=spec.sliding_window or 0,
        softcap=spec.softcap,
        norm_epsilon=spec.norm_epsilon,
    )
    return Rows(out.name, x.rows, spec.q_size)


def finish_layer(
    context: BlockContext, name: str, layer: LayerWeights, residual: Rows, attended: Rows, next_norm: str
) -> tuple[Rows, Rows]:
    """Attention's output projection and the MLP, each added to the residual stream.

    Yields the residual stream and its norm by `next_norm`, the next layer's first or the final one.
    """
    arithmetic = context.arithmetic
    attended = arithmetic.activate(f"{name}/attended", attended)
    mixed = arithmetic.project(f"{name}/o", attended, layer.o)
    residual, x = arithmetic.add_norm(f"{name}/norm2", residual, mixed, layer.norm2)
    gated = arithmetic.gate(f"{name}/mlp", x, layer.gate_up)
    down = arithmetic.project(f"{name}/down", gated, layer.down)
    return arithmetic.add_norm(f"{name}/next_norm", residual, down, next_norm)
