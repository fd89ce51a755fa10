"""Typed access to a mapping that somebody else wrote, where every refusal names file, field and value.

Knows: types and ranges. Refuses to know: what the fields mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tradewind.contract.errors import UserError

LARGEST = 1 << 40
"""No size in a model description is near this; a larger one is damage."""


class CardError(UserError):
    """A model description that is broken, or of a model that is not supported."""


class Fields:
    """A read-only view of one mapping. `origin` is how messages call it, e.g. "config.json of 'my-model'"."""

    def __init__(self, values: Mapping[str, object], *, origin: str) -> None:
        self.values = values
        self.origin = origin

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(field) is not None

    def refuse(self, field: str, must: str) -> CardError:
        """The error for a field whose value is wrong; the caller raises it."""
        if field not in self.values:
            return CardError(f"{self.origin}: the field '{field}' is missing; it must be {must}")
        return CardError(f"{self.origin}: the field '{field}' is {shown(self.values[field])}; it must be {must}")

    def whole(self, field: str, *, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        """A whole number within [low, high]; `default` stands in for a missing or null field."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        number = plain_int(value)
        if number is None or not low <= number <= high:
            raise self.refuse(field, f"a whole number from {low}" + (f" to {high}" if high != LARGEST else ""))
        return number

    def number(self, field: str, *, default: float | None = None, low: float = 0.0, above: bool = True) -> float:
        """A finite number over `low` (or equal to it unless `above`); `default` stands in for a missing or null field."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        real = plain_float(value)
        if real is None or real < low or (above and real == low):
            raise self.refuse(field, f"a number {'over' if above else 'of at least'} {low:g}")
        return real

    def optional_number(self, field: str) -> float | None:
        """A number over 0, or None where the field is missing or null."""
        return self.number(field) if self.has(field) else None

    def flag(self, field: str, *, default: bool) -> bool:
        """True or false; `default` stands in for a missing or null field."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return value

    def word(self, field: str, *, default: str | None = None) -> str:
        """A text; `default` stands in for a missing or null field."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise self.refuse(field, "a word")
        return value

    def mapping(self, field: str) -> Fields | None:
        """The fields of a nested object, or None where it is missing or null."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(field, "an object")
        return Fields(value, origin=f"{self.origin}, '{field}'")

    def ids(self, field: str, *, below: int) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self.values.get(field)
        if value is None:
            return ()
        numbers = [plain_int(item) for item in (value if isinstance(value, list | tuple) else [value])]
        valid = tuple(number for number in numbers if number is not None and 0 <= number < below)
        if len(valid) != len(numbers):
            raise self.refuse(field, f"a token id from 0 to {below - 1}, or a list of them")
        return valid


def plain_int(value: object) -> int | None:
    """The value as int where it is a whole number (numpy's too, never a bool), else None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # an array
        return None


def plain_float(value: object) -> float | None:
    """The value as float where it is a finite number (never a bool or a text), else None."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        real = float(value.__float__())
    except (TypeError, ValueError, OverflowError):
        return None
    return real if math.isfinite(real) else None


def shown(value: object, *, limit: int = 80) -> str:
    """A value for a message: printable and not longer than `limit`."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
