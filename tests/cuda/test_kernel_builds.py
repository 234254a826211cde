"""What the compiler makes of the kernels: nothing spilled, tensor cores used. Needs NVRTC, but no GPU or driver."""

import pytest

from service.executor.cuda.compiler import nvrtc_version
from service.executor.cuda.kernels import (
    DEFAULT_SHARED_BYTES,
    HEAD_DIMS,
    choose_prefill_shape,
    choose_tile_tokens,
    kernel_specs,
)
from tests.cuda.kernel_builds import (
    MAX_SHARED_BYTES,
    Resources,
    all_variants,
    committed_rows,
    committed_version,
    compiled_variant,
    disassembler,
    missing_nvrtc,
    opcodes,
    resources,
    table,
    table_row,
)

pytestmark = pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))

VARIANTS = {variant.name: variant for variant in all_variants()}
# The smallest and the widest that the default tests compile for two architectures; all of them are slow tests.
FEW = [
    "attn_decode SCALAR=bf16 HEAD_DIM=128 BLOCK_SIZE=16 KV_FP8=0",
    "attn_prefill SCALAR=bf16 HEAD_DIM=128 BLOCK_SIZE=16 KV_FP8=0",
    "attn_decode SCALAR=half HEAD_DIM=256 BLOCK_SIZE=32 KV_FP8=1",
    "attn_prefill SCALAR=half HEAD_DIM=256 BLOCK_SIZE=32 KV_FP8=1",
    "rope_kv_write SCALAR=bf16 HEAD_DIM=96 BLOCK_SIZE=16 KV_FP8=1",
    "attn_combine SCALAR=half HEAD_DIM=64",
    "sample_scan LOGIT=float",
    "sample_draw LOGIT=float",
]
ATTENTION = [name for name in VARIANTS if name.startswith(("attn_decode", "attn_prefill"))]

needs_disassembler = pytest.mark.skipif(disassembler() is None, reason="no nvdisasm (wheel nvidia-cuda-nvdisasm)")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", FEW)
def test_kernel_has_neither_stack_nor_spills(name, architecture):
    used = resources(VARIANTS[name], architecture)
    assert Resources(used.registers, 0, 0) == used


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kernel_has_neither_stack_nor_spills_on_any_architecture(name):
    for architecture in MAX_SHARED_BYTES:
        used = resources(VARIANTS[name], architecture)
        assert Resources(used.registers, 0, 0) == used, architecture


@pytest.mark.slow
def test_committed_table_is_what_the_compiler_says():
    _skip_other_compiler()
    assert committed_rows() == {name: table_row(VARIANTS[name]) for name in VARIANTS}
    assert table().count("\n") == len(VARIANTS) + 8


@pytest.mark.parametrize("name", ["sample_count LOGIT=half", "attn_combine SCALAR=bf16 HEAD_DIM=96"])
def test_committed_row_is_what_the_compiler_says(name):
    _skip_other_compiler()
    assert committed_rows()[name] == table_row(VARIANTS[name])


def _skip_other_compiler():
    if nvrtc_version() != committed_version():
        pytest.skip(f"the table is of NVRTC {committed_version()}, this is {nvrtc_version()}")


@needs_disassembler
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_attention_uses_tensor_cores_and_wide_copies(architecture):
    for name in (FEW[0], FEW[2]):
        _check_attention(opcodes(compiled_variant(VARIANTS[name], architecture).cubin))


@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize("architecture", MAX_SHARED_BYTES)
def test_all_attention_uses_tensor_cores_and_wide_copies(architecture):
    for name in ATTENTION:
        _check_attention(opcodes(compiled_variant(VARIANTS[name], architecture).cubin))


def _check_attention(found):
    kinds = {each.split(".")[0] for each in found}
    assert {"HMMA", "LDSM", "LDGSTS"} <= kinds
    assert not {"LDL", "STL"} & kinds
    assert any(each.startswith("LDGSTS") and ".128" in each for each in found)
    narrow = [
        each
        for each in found
        if each.split(".")[0] in {"LDG", "LD"} and {"U16", "S16", "U8", "S8"} & set(each.split("."))
    ]
    assert narrow == []


@pytest.mark.parametrize("architecture", MAX_SHARED_BYTES)
def test_shared_memory_fits_every_architecture(architecture):
    largest = MAX_SHARED_BYTES[architecture]
    shared = [spec.shared_bytes for spec, _ in (variant.on(architecture) for variant in VARIANTS.values())]
    assert max(shared) <= largest


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    # (16 + 256) rows of (D + 8) 16-bit numbers in decode, (128 + 256) in prefill, tiles of 64
    [(64, (39_168, 55_296)), (96, (56_576, 79_872)), (128, (73_984, 104_448))],
)
def test_shared_bytes_of_attention(head_dim, expected):
    variant = VARIANTS[f"attn_decode SCALAR=bf16 HEAD_DIM={head_dim} BLOCK_SIZE=16 KV_FP8=0"]
    specs = {spec.name: spec for spec in kernel_specs(variant.on("sm_90")[1])}
    assert expected == (specs["attn_decode"].shared_bytes, specs["attn_prefill"].shared_bytes)


def test_tiles_are_halved_where_two_blocks_would_not_fit():
    assert [64, 64, 64, 32] == [choose_tile_tokens(head_dim, False, 227 << 10) for head_dim in HEAD_DIMS]
    assert [64, 32, 32, 32] == [choose_tile_tokens(head_dim, False, 99 << 10) for head_dim in HEAD_DIMS]


@pytest.mark.parametrize(
    ("kib", "is_fp8", "expected"),
    [
        # By hand: (rows + 4 * tile) rows of 2 D + 16 bytes, in fp8 those of tiles D + 16; twice, or once with eight
        # warps, and 1 KiB for each, in a multiprocessor that has 1 KiB more than a block may ask for.
        (227, False, ["128/4 t64", "128/4 t64", "128/4 t64", "64/4 t32"]),
        (227, True, ["128/4 t64", "128/4 t64", "128/4 t32", "64/4 t64"]),
        (163, False, ["128/4 t64", "128/4 t64", "128/4 t32", "128/8 t32"]),
        (163, True, ["128/4 t64", "128/4 t64", "128/4 t32", "64/4 t32"]),
        (99, False, ["128/4 t32", "64/4 t32", "128/8 t32", "64/4 t32"]),
        (99, True, ["128/4 t64", "128/4 t32", "64/4 t32", "64/4 t32"]),
    ],
)
def test_a_multiprocessor_holds_eight_warps_of_prefill_where_any_shape_allows_it(kib, is_fp8, expected):
    shapes = [choose_prefill_shape(head_dim, is_fp8, kib << 10) for head_dim in HEAD_DIMS]
    assert expected == [f"{shape.num_rows}/{shape.num_warps} t{shape.tile_tokens}" for shape in shapes]


def test_only_attention_asks_for_more_shared_memory_than_the_default():
    greedy = {
        spec.source
        for spec, _ in (v.on("sm_90") for v in VARIANTS.values())
        if spec.shared_bytes > DEFAULT_SHARED_BYTES
    }
    assert greedy == {"attention.cu"}
