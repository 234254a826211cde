"""Typed reading of a mapping that somebody else wrote: a config.json, the metadata of a GGUF file."""

import sys
from collections.abc import Mapping
from reprlib import repr as shown  # a wrong value may have thousands of digits
from typing import Final

import numpy as np

from graphs.errors import ExportError

_MAX_INTEGER: Final = 2**63 - 1


class Fields:
    """Reads values by key and checks their type; None counts as missing. Errors name the key."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Read from `values`, which stays the caller's."""
        self._values = values

    def get(self, key: str) -> object:
        """Yield the value as a plain Python object, or None when it is missing."""
        value = self._values.get(key)
        return value.item() if isinstance(value, np.generic) else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Yield an integer; without a default a missing one raises ExportError."""
        value = self._present(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # per-layer values of a model whose layers are alike
        if isinstance(value, bool) or not isinstance(value, int):
            raise ExportError(f"{key}: {shown(value)} is not allowed: an integer")
        if abs(value) > _MAX_INTEGER:
            raise ExportError(f"{key}: {shown(value)} is not allowed: at most {_MAX_INTEGER}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Yield an integer, or None when it is missing."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Yield an integer or finite float as a float; without a default a missing one raises ExportError."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ExportError(f"{key}: {shown(value)} is not allowed: a number")
        if not abs(value) <= sys.float_info.max:
            raise ExportError(f"{key}: {shown(value)} is not allowed: a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Yield a boolean."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise ExportError(f"{key}: {shown(value)} is not allowed: true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Yield a string; without a default a missing one raises ExportError."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise ExportError(f"{key}: {shown(value)} is not allowed: a string")
        return value

    def section(self, key: str) -> "Fields | None":
        """Yield the mapping under `key`, or None when it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ExportError(f"{key}: {shown(value)} is not allowed: a mapping")
        return Fields(value)

    def entries(self, key: str) -> list[object]:
        """Yield a list, empty when it is missing. Its entries may be of any type."""
        value = self._present(key, [])
        if not isinstance(value, list):
            raise ExportError(f"{key}: {shown(value)} is not allowed: a list")
        return value

    def require_one_of(self, key: str, values: tuple[object, ...]) -> None:
        """Raise ExportError unless the value is missing or one of `values`."""
        value = self.get(key)
        if value is not None and value not in values:
            raise ExportError(f"{key}: {shown(value)} is not allowed: {' or '.join(map(repr, values))}")

    def refuse(self, key: str, reason: str) -> None:
        """Raise ExportError when the value is there and not false, zero or empty."""
        value = self.get(key)
        if value:
            raise ExportError(f"{key}: {shown(value)} is not allowed: {reason}")

    def _present(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ExportError(f"{key} is missing")
        return value
