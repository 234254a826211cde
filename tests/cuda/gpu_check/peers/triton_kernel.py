"""A short paged decode kernel in Triton: a program a (sequence, KV head, split), and one that merges the splits."""

import triton
import triton.language as tl


@triton.jit
def attend(q, k, v, table, lengths, part, lse, columns, page_stride, head_stride, scale, splits,  # noqa: PLR0917
           GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Rows of a group, padded to 16, over a split of the sequence; part [seq, head, split, 16, DIM] is normalised."""
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    rows, dims = tl.arange(0, 16), tl.arange(0, DIM)
    length = tl.load(lengths + seq)
    per_split = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)
    q_rows = q + ((seq * num_heads + head) * GROUP + rows[:, None]) * DIM + dims[None]
    queries = tl.load(q_rows, mask=rows[:, None] < GROUP, other=0.0)
    largest = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    for at in range(begin, end, TILE):
        tokens = at + tl.arange(0, TILE)
        is_token = tokens < end
        pages = tl.load(table + seq * columns + tokens // PAGE, mask=is_token, other=0).to(tl.int64)
        offsets = pages * page_stride + head * head_stride + (tokens % PAGE) * DIM
        keys = tl.load(k + offsets[None] + dims[:, None], mask=is_token[None], other=0.0)
        scores = tl.where(is_token[None], tl.dot(queries, keys) * scale, -1e30)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        values = tl.load(v + offsets[:, None] + dims[None], mask=is_token[:, None], other=0.0)
        total = total * rescale + tl.sum(weights, 1)
        sums = sums * rescale[:, None] + tl.dot(weights.to(values.dtype), values)
        largest = new_largest
    place = ((seq * num_heads + head) * splits + split) * 16 + rows
    safe = tl.maximum(total, 1e-30)
    tl.store(part + place[:, None] * DIM + dims[None], sums / safe[:, None])
    tl.store(lse + place, tl.where(total > 0, largest + tl.log2(safe), -1e30))


@triton.jit
def merge(part, lse, out, splits, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):  # noqa: PLR0917
    """out [seq, head * GROUP + row, DIM]; SPLITS: the power of two that holds `splits`."""
    seq, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    each, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    is_split = each < splits
    group = seq * tl.num_programs(1) + head
    place = (group * splits + each) * 16 + row
    lengths = tl.load(lse + place, mask=is_split, other=-1e30)
    weights = tl.exp2(lengths - tl.max(lengths, 0))
    parts = tl.load(part + place[:, None] * DIM + dims[None], mask=is_split[:, None], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (group * GROUP + row) * DIM + dims, merged.to(out.dtype.element_ty))
