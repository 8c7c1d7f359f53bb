"""Headers of safetensors files: written, and read with every entry held against the file."""

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from megatron.checkpointing.index import SAFETENSORS_NAMES, dtype_of
from megatron.checkpointing.untrusted import shape_of, unique_keys, whole_numbers

# A limit of the format.
_LARGEST = 100_000_000
_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_NAMES.items()}


@dataclasses.dataclass(frozen=True)
class Span:
    """A tensor in a safetensors file: PyTorch's name of its dtype, its shape, and its bytes `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """All that stands before the values of `tensors`, each a name, PyTorch's name of a dtype, and a shape.

    The values follow one another in the same order; wide elements first keeps each aligned to its own element size.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype_of(dtype).itemsize
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(stream: IO[bytes]) -> dict[str, Span]:
    """The tensors of an open file by name. Raises ValueError where they are not one behind another to its very end."""
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if length > min(_LARGEST, size - 8):
        raise ValueError("it is cut, or no safetensors file")
    try:
        entries = json.loads(stream.read(length), object_pairs_hook=unique_keys)
        if not isinstance(entries, dict):
            raise ValueError("it is not a JSON object")
        spans = {n: _span(n, entry, 8 + length) for n, entry in entries.items() if n != "__metadata__"}
        _check_bounds(spans, 8 + length, size)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    return spans


def _span(name: str, entry: Any, data: int) -> Span:
    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {reprlib.repr(name)} has not just dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ValueError(f"{reprlib.repr(name)} is of {reprlib.repr(entry['dtype'])}; read are {', '.join(_DTYPES)}")
    dtype, shape, offsets = _DTYPES[entry["dtype"]], shape_of(entry["shape"]), whole_numbers(entry["data_offsets"])
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype_of(dtype).itemsize:
        raise ValueError(f"{reprlib.repr(name)} of {dtype} {list(shape)} has the bytes {reprlib.repr(offsets)}")
    return Span(dtype, shape, data + offsets[0], data + offsets[1])


def _check_bounds(spans: Mapping[str, Span], begin: int, end: int) -> None:
    """Raise ValueError unless each byte from `begin` to `end` is of one tensor."""
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != begin:
            raise ValueError(f"{reprlib.repr(name)} begins at byte {span.begin}, and byte {begin} is the next")
        begin = span.end
    if begin != end:
        raise ValueError(f"its tensors end at byte {begin}, and the file has {end}: it is cut, or more was added")
