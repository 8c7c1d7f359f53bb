"""Plain safetensors files, as Hugging Face keeps models: opened without reading the tensors, written one at a time."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.files import atomic_write
from megatron.checkpointing.convert.deferred import Readable
from megatron.checkpointing.index import SAFETENSORS_NAMES, dtype_name, dtype_of

_LARGEST_HEADER = 100_000_000
_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_NAMES.items()}
_BLOCK = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A tensor in a safetensors file."""

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Its values."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        content = bytearray(count * self.dtype.itemsize)
        with open(self.path, "rb") as stream:
            stream.seek(self.begin)
            if stream.readinto(content) < len(content):
                raise ValueError(f"{self.path}: it is cut")
        return torch.frombuffer(content, dtype=self.dtype).view(self.shape)


def read_safetensors(path: Path) -> dict[str, StoredArray]:
    """The tensors in a file by name. Raises ValueError naming the file where it is damaged or no such file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_LARGEST_HEADER, size - 8):
                raise ValueError("it is cut, or no safetensors file")
            entries = json.loads(stream.read(length))
        return {
            name: _stored(path, entry, 8 + length, size) for name, entry in entries.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header cannot be read ({error})") from error


def _stored(path: Path, entry: Mapping[str, Any], data: int, size: int) -> StoredArray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"numbers of kind {entry['dtype']} are not read here")
    dtype, shape, (begin, end) = dtype_of(_DTYPES[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin)) or end != begin + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} has the bytes {begin} to {end}")
    if data + end > size:
        raise ValueError("it is cut")
    return StoredArray(path, data + begin, dtype, shape)


def write_safetensors(path: Path, tensors: Mapping[str, Readable]) -> None:
    """Write a file of these tensors; one of them at a time is read. It takes its name when it is complete."""
    # Wide elements first, which keeps each tensor aligned to its own element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        end = position + math.prod(tensor.shape) * tensor.dtype.itemsize
        kind = SAFETENSORS_NAMES[dtype_name(tensor.dtype)]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with atomic_write(path, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in ordered:
            content = tensor.read().contiguous().flatten().view(torch.uint8)
            for begin in range(0, len(content), _BLOCK):
                stream.write(content[begin : begin + _BLOCK].numpy().data)
