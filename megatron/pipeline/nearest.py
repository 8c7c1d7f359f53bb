"""The nearest values that would have been accepted, for a complaint."""

from collections.abc import Callable


def nearest(value: int, legal: Callable[[int], bool], highest: int) -> list[int]:
    """The closest `legal` numbers below and above `value`, from 1 to `highest`; where there is none, it is left out."""
    below = next((n for n in range(min(value - 1, highest), 0, -1) if legal(n)), None)
    above = next((n for n in range(max(value + 1, 1), highest + 1) if legal(n)), None)
    return [n for n in (below, above) if n is not None]


def nearest_words(value: int, legal: Callable[[int], bool], highest: int) -> str:
    """`; the nearest are 8 and 12`, nothing where there is no such number."""
    found = " and ".join(map(str, nearest(value, legal, highest)))
    return found and f"; the nearest {'are' if ' ' in found else 'is'} {found}"
