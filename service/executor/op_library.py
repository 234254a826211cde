"""The C functions that the op library exports beside its ops."""

import ctypes
from pathlib import Path

from graphs.manifest import ModelInfo
from graphs.ops import library_path
from service.errors import ConfigError
from service.executor.api import ExecutorLimits


class OpLibrary:
    """The loaded op library. Loading it twice, here and by ONNX Runtime, yields the same one."""

    def __init__(self) -> None:
        """Find and load it. Raises ConfigError when it is not built or cannot be loaded."""
        try:
            self.path: Path = library_path()
            self.functions = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise ConfigError(f"the op library cannot be loaded: {error}") from error

    def attention_workspace_floats(self, model: ModelInfo, limits: ExecutorLimits) -> int:
        """float32 elements worth giving PagedAttention as its workspace input."""
        function = self.functions.chairlift_attention_workspace_floats
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_int64] * 6
        return int(
            function(
                limits.max_num_batched_tokens,
                limits.max_num_seqs,
                model.num_heads,
                model.num_kv_heads,
                model.head_dim,
                limits.max_model_len,
            )
        )
