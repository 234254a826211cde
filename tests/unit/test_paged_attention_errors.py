"""A wrong input is an error that names it, and nothing is written."""

from dataclasses import replace

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException

from tests.unit.attention_cases import SPEC, make_case, run_attention
from tests.unit.attention_mistakes import MISTAKES, right_case


@pytest.mark.parametrize(("name", "change", "message"), MISTAKES)
def test_a_wrong_input_is_named(name, change, message):
    case = right_case()
    before = case.kv_cache.tobytes()
    inputs = case.inputs()
    with pytest.raises(InvalidArgument, match=message) as caught:
        run_attention(SPEC, {**inputs, name: change(inputs[name])})
    assert f"'{name}'" in str(caught.value)
    assert before == case.kv_cache.tobytes()


@pytest.mark.parametrize("name", ["qkv", "cu_seqlens", "positions", "workspace", "k_norm"])
def test_a_wrong_element_type_is_refused_when_the_model_loads(name):
    inputs = right_case().inputs()
    with pytest.raises(Exception, match=r"Type 'tensor\(int64\)' of input parameter"):
        run_attention(SPEC, {**inputs, name: inputs[name].astype(np.int64)})


def test_too_many_rotary_columns_are_refused():
    case = make_case(SPEC, [(1, 20)], rotary_dim=34)
    with pytest.raises(InvalidArgument, match="'cos' has 17 columns, more than half of head_dim 32"):
        case.run()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 5}, "'num_heads' 5 must be a positive multiple of 'num_kv_heads' 2"),
        ({"num_heads": 0}, "'num_heads' 0"),
        ({"num_kv_heads": 0}, "'num_kv_heads' 0"),
        ({"head_dim": 264}, "'head_dim' is 264, expected a multiple of 8 up to 256"),
        ({"head_dim": 20}, "'head_dim' is 20"),
        ({"sliding_window": -1}, "'sliding_window' is negative"),
        ({"softcap": -1.0}, "'softcap' is negative"),
    ],
)
def test_a_wrong_attribute_is_refused_when_the_model_loads(attributes, message):
    inputs = right_case().inputs()
    with pytest.raises(RuntimeException, match=message):
        run_attention(replace(SPEC, **attributes), inputs)
