"""Size and element type of the KV buffer."""

import re

import numpy as np
import pytest

from graphs.manifest import ModelInfo
from service.errors import ConfigError
from service.executor.kv_layout import (
    CPU_KV_DTYPES,
    KvDtype,
    KvLayout,
    allocate_kv,
    copy_blocks,
    fit_kv_layout,
    is_share_of_memory,
    parse_kv_memory,
)
from tests.unit.process_memory import resident_bytes

MODEL = ModelInfo(
    name="m",
    architecture="llama",
    vocab_size=100,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    bos_token_id=None,
    eos_token_ids=(2,),
    add_bos=False,
)
FREE_BYTES = 8 * 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1073741824", 2**30),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("4G", 4 * 10**9),
        ("1000B", 1000),
        ("0.5", 4 * 2**30),
        ("25%", 2 * 2**30),
        ("1", FREE_BYTES),
        ("100%", FREE_BYTES),
        (str(FREE_BYTES), FREE_BYTES),
    ],
)
def test_kv_memory_is_bytes_or_a_share_of_free_memory(text: str, expected: int) -> None:
    assert expected == parse_kv_memory(text, FREE_BYTES)


@pytest.mark.parametrize("text", ["", "lots", "-1", "0.5.1", "12XB", "12i", "101%", "9GiB", str(FREE_BYTES + 1), "1e9"])
def test_other_kv_memory_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_memory: {re.escape(repr(text))}"):
        parse_kv_memory(text, FREE_BYTES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", True),
        ("1", True),
        ("1%", True),
        ("100 %", True),
        ("0", False),
        ("0%", False),
        ("2", False),
        ("0.5GiB", False),
        ("1B", False),
    ],
)
def test_a_share_depends_on_what_is_free(text: str, expected: bool) -> None:
    assert expected == is_share_of_memory(text)
    assert expected == (parse_kv_memory(text, FREE_BYTES) != parse_kv_memory(text, 2 * FREE_BYTES))


def test_what_is_neither_bytes_nor_a_share_is_refused_by_its_setting() -> None:
    with pytest.raises(ConfigError, match="host_kv_memory: 'lots' is neither bytes"):
        is_share_of_memory("lots", "host_kv_memory")


@pytest.mark.parametrize("text", ["1.5", "1.01", "1048576.0"])
def test_a_broken_number_above_one_needs_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{re.escape(text)}': a share must be at most 1, and bytes need a unit"):
        parse_kv_memory(text, FREE_BYTES)


@pytest.mark.parametrize(
    ("choice", "weight_format", "expected"),
    [
        ("auto", "float32", KvDtype.FLOAT32),
        ("auto", "w8a8", KvDtype.FLOAT16),
        ("auto", "int4", KvDtype.FLOAT16),
        ("int8", "float32", KvDtype.INT8),
        ("float32", "w8a8", KvDtype.FLOAT32),
    ],
)
def test_kv_type_follows_the_weights_unless_it_is_named(choice: str, weight_format: str, expected: KvDtype) -> None:
    assert expected == KvDtype.choose(choice, weight_format)


def test_unknown_kv_type_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="kv_dtype: 'int3' does not run on cpu: one of auto, float32, float16, int8"):
        KvDtype.choose("int3", "w8a8")


# 30 layers * (keys, values) * 3 heads * 16 tokens * (64 channels * bytes each, and 4 bytes of scale for int8)
BLOCK_BYTES = {KvDtype.FLOAT32: 737_280, KvDtype.FLOAT16: 368_640, KvDtype.INT8: 195_840}
BLOCK_BYTES |= {KvDtype.BFLOAT16: 368_640, KvDtype.FP8: 184_320}


@pytest.mark.parametrize(("dtype", "block_bytes"), BLOCK_BYTES.items())
def test_blocks_are_as_many_as_the_memory_holds(dtype: KvDtype, block_bytes: int) -> None:
    assert fit_kv_layout(MODEL, dtype, 16, 8 * block_bytes - 1).num_blocks == 7
    layout = fit_kv_layout(MODEL, dtype, 16, 8 * block_bytes)
    assert (8, 8 * block_bytes, block_bytes // 16) == (layout.num_blocks, layout.total_bytes, layout.token_bytes)


@pytest.mark.parametrize(("dtype", "block_bytes"), BLOCK_BYTES.items())
def test_memory_for_the_null_block_alone_is_refused(dtype: KvDtype, block_bytes: int) -> None:
    assert fit_kv_layout(MODEL, dtype, 16, 2 * block_bytes).num_blocks == 2
    with pytest.raises(ConfigError, match=f"a block of 16 tokens takes {block_bytes:,} bytes over 30 layers"):
        fit_kv_layout(MODEL, dtype, 16, 2 * block_bytes - 1)


def test_slots_stay_within_int32() -> None:
    layout = fit_kv_layout(MODEL, KvDtype.INT8, 16, 2**50)
    assert layout.num_blocks * layout.block_size <= 2**31 - 1


@pytest.mark.parametrize("block_size", [0, -16, 12, 17])
def test_block_size_must_be_a_power_of_two(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size: {block_size} is not a power of two"):
        fit_kv_layout(MODEL, KvDtype.FLOAT16, block_size, FREE_BYTES)


@pytest.mark.parametrize(
    ("dtype", "width", "numpy_type"),
    [(KvDtype.FLOAT32, 64, np.float32), (KvDtype.FLOAT16, 64, np.float16), (KvDtype.INT8, 68, np.int8)],
)
def test_allocated_arrays_are_zero_page_aligned_and_shaped_as_the_op_reads_them(
    dtype: KvDtype, width: int, numpy_type: type
) -> None:
    layout = KvLayout(dtype, num_layers=2, num_blocks=5, num_kv_heads=3, block_size=16, head_dim=64)
    arrays = allocate_kv(layout)
    assert [(5, 2, 3, 16, width)] * 2 == [array.shape for array in arrays]
    assert layout.total_bytes == sum(array.nbytes for array in arrays)
    for array in arrays:
        assert (numpy_type, 0, True) == (array.dtype, array.ctypes.data % 4096, not array.any())


@pytest.mark.parametrize(("prefault", "share"), [(False, 0), (True, 1)])
def test_memory_is_taken_at_once_only_when_asked_for(prefault: bool, share: int) -> None:
    layout = KvLayout(KvDtype.FLOAT16, num_layers=2, num_blocks=1024, num_kv_heads=4, block_size=16, head_dim=128)
    before_bytes = resident_bytes()
    arrays = allocate_kv(layout, prefault=prefault)
    taken_bytes = resident_bytes() - before_bytes
    assert taken_bytes == pytest.approx(share * layout.total_bytes, abs=layout.total_bytes // 8)
    assert not any(array[::100].any() for array in arrays)


def test_more_than_the_address_space_is_refused() -> None:
    layout = KvLayout(KvDtype.FLOAT32, num_layers=1, num_blocks=2**34, num_kv_heads=8, block_size=16, head_dim=256)
    with pytest.raises(ConfigError, match="kv_memory: the system refuses 4,503,599,627,370,496 bytes"):
        allocate_kv(layout)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES)
def test_a_copied_block_is_the_same_in_every_layer(dtype: KvDtype) -> None:
    layout = KvLayout(dtype, num_layers=2, num_blocks=5, num_kv_heads=2, block_size=4, head_dim=8)
    arrays, rng = allocate_kv(layout), np.random.default_rng(0)
    for array in arrays:
        array[:] = rng.integers(-9, 9, array.shape)
    before = [array.copy() for array in arrays]
    copy_blocks(arrays, np.array([[1, 3], [1, 4]], np.int32))
    for array, old in zip(arrays, before, strict=True):
        assert np.array_equal(array[[0, 1, 2, 3, 4]], old[[0, 1, 2, 1, 1]])
