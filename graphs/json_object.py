"""Typed values of a JSON object. Standard library only."""

import math


class JsonFieldError(ValueError):
    """A value is missing or of another type: the message names where it belongs."""


class JsonObject:
    """Takes typed values out of one JSON object. Raises JsonFieldError, which names the field."""

    def __init__(self, document: object, origin: str) -> None:
        """`origin` names the object in errors."""
        if not isinstance(document, dict):
            raise JsonFieldError(f"{origin}: must be a JSON object")
        self.origin = origin
        self._document = document

    def names(self) -> list[str]:
        """Its fields' names."""
        return list(self._document)

    def is_null(self, name: str) -> bool:
        """Whether the field, which must be there, is null."""
        return self._value(name) is None

    def child(self, name: str) -> "JsonObject":
        """An object of its own."""
        return JsonObject(self._value(name), f"{self.origin}: {name}")

    def string(self, name: str) -> str:
        """A string."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def strings(self) -> dict[str, str]:
        """All fields, each a string."""
        return {name: self.string(name) for name in self._document}

    def integer(self, name: str, minimum: int = 0, maximum: float = math.inf) -> int:
        """An integer from `minimum` to `maximum`."""
        return self._integer(name, self._value(name), minimum, maximum)

    def integers(self, name: str, maximum: float = math.inf) -> tuple[int, ...]:
        """A list of integers from 0 to `maximum`."""
        values = self._value(name)
        if not isinstance(values, list):
            raise self._wrong(name, values, "a list of integers")
        return tuple(self._integer(name, value, 0, maximum) for value in values)

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._value(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def _integer(self, name: str, value: object, minimum: int, maximum: float) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            most = "" if maximum == math.inf else f" and at most {maximum}"
            raise self._wrong(name, value, f"an integer of at least {minimum}{most}")
        return value

    def _value(self, name: str) -> object:
        try:
            return self._document[name]
        except KeyError:
            raise JsonFieldError(f"{self.origin}: {name} is missing") from None

    def _wrong(self, name: str, value: object, expected: str) -> JsonFieldError:
        return JsonFieldError(f"{self.origin}: {name}: {value!r} is not {expected}")
