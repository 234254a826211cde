"""Builds prefill.onnx and decode.onnx of a decoder-only transformer.

Both compute the same function of a flat, ragged batch of tokens. prefill.onnx takes `logit_indices` and drops all other
rows as soon as the last layer's keys and values are written: that layer's output projection and MLP, and the LM head,
run over the rows that get logits only. decode.onnx yields logits for every row.
"""

from typing import Final, Literal

from onnx import ModelProto, TensorProto

from graphs.arithmetic import FloatArithmetic, IntegerArithmetic
from graphs.decoder_weights import ChannelProjection, DecoderWeights
from graphs.graph_builder import GraphBuilder, Value, floats, int32s
from graphs.layers import BlockContext, StepInputs, attention, embed, finish_layer, take_rows
from graphs.manifest import WEIGHTS_NAME
from graphs.spec import ModelSpec
from graphs.weight_file import WeightFile

GraphKind = Literal["prefill", "decode"]

_TOKENS: Final = "num_tokens"
_LOGITS: Final = "num_logits"


def build_decoder(kind: GraphKind, spec: ModelSpec, weights: DecoderWeights, file: WeightFile) -> ModelProto:
    """The graph of one kind over the initializers in `file`, which it refers to as WEIGHTS_NAME in its own folder."""
    builder = GraphBuilder(kind, file, WEIGHTS_NAME)
    token_ids = builder.input(int32s("token_ids", _TOKENS))
    inputs = _step_inputs(builder, weights)
    logit_indices = builder.input(int32s("logit_indices", _LOGITS)) if kind == "prefill" else None
    builder.input(floats("workspace", "workspace_size"))
    is_integer = isinstance(weights.head, ChannelProjection)
    arithmetic = (IntegerArithmetic if is_integer else FloatArithmetic)(builder, spec.norm_epsilon)
    context = BlockContext(builder, arithmetic, spec, weights, inputs)

    residual = embed(builder, weights.embedding, token_ids, _TOKENS, spec.hidden_size)
    x = arithmetic.norm("layers.0/norm1", residual, weights.layers[0].norm1)
    next_norms = [*(layer.norm1 for layer in weights.layers[1:]), weights.final_norm]
    for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
        name = f"layers.{index}"
        attended = attention(context, name, layer, x, builder.input(_kv_cache(index, spec)))
        if logit_indices is not None and index == spec.num_layers - 1:
            attended = take_rows(builder, f"{name}/attended_rows", attended, logit_indices, _LOGITS)
            residual = take_rows(builder, f"{name}/residual_rows", residual, logit_indices, _LOGITS)
        residual, x = finish_layer(context, name, layer, residual, attended, next_norm)

    scores = arithmetic.project("head", x, weights.head)
    logits = floats("logits", x.rows, spec.vocab_size)
    builder.rename(scores.name, logits.name)
    builder.output(logits)
    return builder.finish(f"{spec.name}: {kind} step")


def _step_inputs(builder: GraphBuilder, weights: DecoderWeights) -> StepInputs:
    """Declare the step's inputs that attention reads; `workspace` is named only, to keep its place in the order."""
    positions = builder.input(int32s("positions", _TOKENS))
    slot_mapping = builder.input(int32s("slot_mapping", _TOKENS))
    return StepInputs(
        cu_seqlens=builder.input(int32s("cu_seqlens", "num_seqs_plus_1")),
        context_lens=builder.input(int32s("context_lens", "num_seqs")),
        block_table=builder.input(int32s("block_table", "num_seqs", "max_blocks")),
        slot_mapping=slot_mapping,
        positions=positions,
        cos=builder.weight(weights.cos),
        sin=builder.weight(weights.sin),
        workspace="workspace",
    )


def _kv_cache(index: int, spec: ModelSpec) -> Value:
    """One layer's KV buffer. Type, block size and, for int8, the room for scales are the executor's choice."""
    shape = ("num_blocks", 2, spec.num_kv_heads, "block_size", "kv_width")
    return Value(f"kv_cache.{index}", TensorProto.FLOAT, shape)
