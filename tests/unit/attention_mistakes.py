"""Wrong inputs for PagedAttention and what the op must say about each."""

from collections.abc import Callable

import numpy as np

from tests.unit.attention_cases import SPEC, AttentionCase, make_case

Change = Callable[[np.ndarray], np.ndarray]


def put(index, value) -> Change:
    """A change that sets one element."""

    def change(array: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed[index] = value
        return changed

    return change


# (input, what is done to it, what the message says besides the input's name)
MISTAKES: list[tuple[str, Change, str]] = [
    ("qkv", lambda a: a[:, :-1], r"has shape \[4, 319\], expected \[any, 320\]"),
    ("qkv", lambda a: a[None], r"has shape \[1, 4, 320\]"),
    ("kv_cache", lambda a: a.astype(np.float64), "expected float32, float16 or int8"),
    ("kv_cache", lambda a: a[..., :-1], r"expected \[any, 2, 2, any, 32\]"),
    ("kv_cache", lambda a: a[:, :1], r"expected \[any, 2, 2, any, 32\]"),
    ("kv_cache", lambda a: a[:, :, :1], r"expected \[any, 2, 2, any, 32\]"),
    ("kv_cache", lambda a: a[0], "has shape"),
    ("kv_cache", lambda a: a[:, :, :, :0], "has 5 blocks of 0 tokens"),
    ("kv_cache", lambda a: np.zeros(a.shape, np.int8), r"expected \[any, 2, 2, any, 36\]"),
    ("kv_cache", lambda a: a[:0], "has 0 blocks of 16 tokens"),
    ("cu_seqlens", lambda a: a[:-1], r"has shape \[2\], expected \[3\]"),
    ("cu_seqlens", put(0, 1), "starts at 1, expected 0"),
    ("cu_seqlens", put(1, 5), "decreases at sequence 1"),
    ("cu_seqlens", put(2, 5), "ends at 5, but there are 4 tokens"),
    ("cu_seqlens", put(1, -(2**31)), "decreases at sequence 0"),
    ("context_lens", put(1, 2), "of sequence 1 is 2, less than its 3 tokens"),
    ("context_lens", put(0, -1), "of sequence 0 is -1"),
    ("context_lens", lambda a: a[:, None], "expected 1 dimensions"),
    ("block_table", lambda a: a[:, :1], "has 1 columns, but sequence 0 needs 2 for its 20 tokens"),
    ("block_table", lambda a: a[:1], r"expected \[2, any\]"),
    ("block_table", put((0, 1), -1), "of sequence 0 holds block -1 at 1; the buffer has 5 blocks"),
    ("block_table", put((1, 0), 5), "of sequence 1 holds block 5 at 0"),
    ("slot_mapping", lambda a: a[:-1], r"has shape \[3\], expected \[4\]"),
    ("slot_mapping", put(2, 80), "of token 2 is 80; the buffer has 80 slots"),
    ("slot_mapping", put(0, -2), "of token 0 is -2"),
    ("positions", lambda a: a[:-1], r"has shape \[3\], expected \[4\]"),
    ("positions", put(3, 21), "of token 3 is 21; 'cos' and 'sin' have 21 rows"),
    ("positions", put(0, -1), "of token 0 is -1"),
    ("cos", lambda a: a[0], "expected 2 dimensions"),
    ("sin", lambda a: np.tile(a, 2), r"has shape \[21, 32\], expected \[21, 16\]"),
    ("sin", lambda a: a[:-1], r"has shape \[20, 16\], expected \[21, 16\]"),
    ("workspace", lambda a: a[None], "expected 1 dimensions"),
    ("q_norm", lambda a: a[:-1], r"has shape \[31\], expected \[32\]"),
    ("k_norm", lambda a: a[None], r"has shape \[1, 32\], expected \[32\]"),
]


def right_case() -> AttentionCase:
    """A small case that works: what each mistake is made in."""
    return make_case(SPEC, [(1, 20), (3, 9)], has_norms=True)
