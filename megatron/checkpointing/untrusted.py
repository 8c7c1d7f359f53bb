"""Names, numbers, shapes and objects out of files that anybody may have written: what is none is refused."""

import math
import reprlib
from typing import Any

# What 64 bits count, and more dimensions than any tensor has.
_LARGEST_NUMBER = 2**63 - 1
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 200


def shown(name: str) -> str:
    """A name as a sentence tells it: in one line, and not at any length."""
    return name if name.isprintable() and len(name) <= _LONGEST_NAME else reprlib.repr(name)


def whole_numbers(values: Any) -> tuple[int, ...]:
    """A list of whole numbers from JSON. Raises ValueError for anything else, negative and too large ones included."""
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v <= _LARGEST_NUMBER for v in values):
        raise ValueError(f"{reprlib.repr(values)} is not a list of whole numbers from 0 to 2^63")
    return tuple(values)


def shape_of(values: Any) -> tuple[int, ...]:
    """The shape of a tensor from JSON. Raises ValueError where no tensor has it."""
    shape = whole_numbers(values)
    if len(shape) > _MOST_DIMENSIONS or math.prod(size for size in shape if size) > _LARGEST_NUMBER // 8:
        raise ValueError(f"{reprlib.repr(values)} is not the shape of a tensor: it is too large")
    return shape


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON from its entries, for `object_pairs_hook`. Raises ValueError where two have one name."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{reprlib.repr(twice)} is there twice")
    return entries
