"""Everything in a checkpoint that is no tensor, as JSON that any reader understands."""

import json
import math
from collections.abc import Mapping
from typing import Any

# JSON has no numbers for infinities and NaN; they are kept as {"__float__": "inf"}.
_FLOAT = "__float__"
_NO_NUMBERS = ("inf", "-inf", "nan")


def to_json(value: Any) -> str:
    """`value` as JSON text: None, bool, int, float (exact, infinities and NaN too), str, lists, dicts with str keys.

    Tuples become lists. Raises ValueError naming the entry for anything else.
    """
    return json.dumps(_encoded(value, "state"), indent=1, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """What `to_json` was given. Raises ValueError where `text` is none of its texts."""
    try:
        return json.loads(text, object_hook=_decoded)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def _encoded(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, list | tuple):
        return [_encoded(entry, f"{where}[{number}]") for number, entry in enumerate(value)]
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == _FLOAT]
        if wrong:
            raise ValueError(f"{where}: the key {wrong[0]!r} cannot be kept in a checkpoint; keys are strings")
        return {key: _encoded(entry, f"{where}.{key}") for key, entry in value.items()}
    raise ValueError(f"{where}: {type(value).__name__} cannot be kept in a checkpoint; plain values and tensors can")


def _decoded(entries: dict[str, Any]) -> Any:
    if entries.keys() != {_FLOAT}:
        return entries
    if entries[_FLOAT] not in _NO_NUMBERS:
        raise ValueError(f"{_FLOAT} {entries[_FLOAT]!r}: accepted are {', '.join(_NO_NUMBERS)}")
    return float(entries[_FLOAT])
