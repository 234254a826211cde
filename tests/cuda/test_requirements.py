"""What the CUDA path refuses, by name."""

from dataclasses import replace

import pytest

from graphs.manifest import Manifest
from service.errors import ConfigError
from service.executor.cuda.requirements import require_cuda_model
from tests.cuda.conftest import CONFIG


def test_what_the_cuda_path_has_nothing_for_is_refused_by_name(tiny_float16) -> None:
    manifest = Manifest.load(tiny_float16)
    require_cuda_model(CONFIG, manifest)
    require_cuda_model(replace(CONFIG, kv_dtype="float16"), manifest)
    with pytest.raises(ConfigError, match="weight format: 'w8a8' does not run on cuda: export the model in 'float16'"):
        require_cuda_model(CONFIG, replace(manifest, weight_format="w8a8"))
    with pytest.raises(ConfigError, match="kv_dtype: 'int8' does not run on cuda"):
        require_cuda_model(replace(CONFIG, kv_dtype="int8"), manifest)
    model = manifest.model
    require_cuda_model(CONFIG, replace(manifest, model=replace(model, num_heads=16, num_kv_heads=1)))
    with pytest.raises(ConfigError, match="num_heads: 17 for 1 KV heads do not run on cuda: at most 16 for each"):
        require_cuda_model(CONFIG, replace(manifest, model=replace(model, num_heads=17, num_kv_heads=1)))
