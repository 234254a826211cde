"""The C functions that the op library exports beside its ops."""

import ctypes
from pathlib import Path

from graphs.ops import library_path
from service.errors import ConfigError


class OpLibrary:
    """The loaded op library. Loading it twice, here and by ONNX Runtime, yields the same one."""

    def __init__(self) -> None:
        """Find and load it. Raises ConfigError when it is not built or cannot be loaded."""
        try:
            self.path: Path = library_path()
            self._functions = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise ConfigError(f"the op library cannot be loaded: {error}") from error

    @property
    def has_int8_dot(self) -> bool:
        """True when this processor multiplies u8 by s8 without saturating."""
        return bool(self._functions.chairlift_has_int8_dot())

    def attention_workspace_floats(self, num_threads: int, num_heads: int, head_dim: int) -> int:
        """float32 elements that PagedAttention's workspace input must have."""
        function = self._functions.chairlift_attention_workspace_floats
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_int64] * 3
        return int(function(num_threads, num_heads, head_dim))
