"""Reads pieces from safetensors files, only the blocks that are needed, each verified against its checksum."""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron.base.rectangles import Rectangle, intersection, rectangles_of_range
from megatron.checkpointing.index import SAFETENSORS_NAMES, StoredPiece, StoredTensor, dtype_of

_LARGEST_HEADER = 100_000_000


class PieceReader:
    """The files of one checkpoint folder. Context manager; keeps files open and one block of bytes in memory.

    Raises ValueError, naming the file and the tensor, where a file is not what the index says.
    """

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._files: dict[str, _PieceFile] = {}
        self._stack = contextlib.ExitStack()
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: StoredTensor, targets: Sequence[tuple[Rectangle, Tensor]]) -> None:
        """Copy the stored values of a tensor into `targets`: rectangles of it, and tensors of their shapes."""
        for piece in tensor.pieces:
            touched = [(r, values) for r, values in targets if intersection(r, piece.rectangle) is not None]
            if touched:
                self._read_piece(tensor, piece, touched)

    def _read_piece(
        self, tensor: StoredTensor, piece: StoredPiece, targets: Sequence[tuple[Rectangle, Tensor]]
    ) -> None:
        file = self._open(piece.file)
        dtype = dtype_of(tensor.dtype)
        begin = file.begin(tensor, piece, self._block_bytes)
        step = self._block_bytes // dtype.itemsize
        for number, checksum in enumerate(piece.checksums):
            first = number * step
            last = min(first + step, piece.rectangle.size)
            parts = _parts(piece.rectangle, first, last)
            if not any(intersection(part, r) for part in parts for r, _ in targets):
                continue
            size = (last - first) * dtype.itemsize
            if len(self._buffer) < size:
                self._buffer = bytearray(size)
            if not file.read(begin + first * dtype.itemsize, memoryview(self._buffer)[:size], checksum):
                raise ValueError(f"{file.path}: tensor {tensor.name} does not match its checksum (block {number})")
            _scatter(torch.frombuffer(self._buffer, dtype=dtype, count=last - first), parts, targets)

    def _open(self, name: str) -> "_PieceFile":
        if name not in self._files:
            self._files[name] = self._stack.enter_context(_PieceFile(self._folder / name))
        return self._files[name]


def _parts(piece: Rectangle, first: int, last: int) -> list[Rectangle]:
    """Elements `first` to `last` of a piece in row-major order, as rectangles of the tensor."""
    return [
        Rectangle(tuple(o + p for o, p in zip(part.offset, piece.offset, strict=True)), part.shape)
        for part in rectangles_of_range(piece.shape, first, last)
    ]


def _scatter(block: Tensor, parts: Sequence[Rectangle], targets: Sequence[tuple[Rectangle, Tensor]]) -> None:
    """Copy a block, whose elements are `parts` one after another, to where its targets overlap it."""
    for part, values in zip(parts, block.split([part.size for part in parts]), strict=True):
        for rectangle, target in targets:
            both = intersection(part, rectangle)
            if both is not None:
                source = values.view(part.shape)[both.slices(part.offset)]
                target[both.slices(rectangle.offset)].copy_(source)


class _PieceFile:
    """One safetensors file, opened, with its header read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as stack:
            self._stream = stack.enter_context(open(path, "rb", buffering=0))
            self._entries, self._data_begin = self._read_header()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _read_header(self) -> tuple[Mapping[str, Any], int]:
        length = int.from_bytes(self._stream.read(8), "little")
        if length > min(_LARGEST_HEADER, os.fstat(self._stream.fileno()).st_size - 8):
            raise ValueError(f"{self.path}: it is cut, or no safetensors file")
        try:
            entries = json.loads(self._stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: its header cannot be read ({error})") from error
        if not isinstance(entries, dict):
            raise ValueError(f"{self.path}: its header is not a JSON object")
        return entries, 8 + length

    def begin(self, tensor: StoredTensor, piece: StoredPiece, block_bytes: int) -> int:
        """Position of a piece's first byte, once the header has said of the piece what the index says."""
        key = piece.key(tensor.name)
        size = piece.rectangle.size * dtype_of(tensor.dtype).itemsize
        try:
            start = int(self._entries[key]["data_offsets"][0])
        except (KeyError, TypeError, IndexError, ValueError):
            start = -1
        expected = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(piece.rectangle.shape),
            "data_offsets": [start, start + size],
        }
        if start < 0 or self._entries[key] != expected:
            raise ValueError(f"{self.path}: its header does not have {key} as the index describes it")
        if len(piece.checksums) != math.ceil(size / block_bytes):
            raise ValueError(f"{self.path}: the index does not have one checksum for each block of {key}")
        return self._data_begin + start

    def read(self, begin: int, target: memoryview, checksum: int) -> bool:
        """Fill `target` with the bytes at `begin`; whether they match `checksum`."""
        self._stream.seek(begin)
        filled = 0
        while filled < len(target):
            count = self._stream.readinto(target[filled:])
            if not count:
                raise ValueError(f"{self.path}: it ends before byte {begin + len(target)}")
            filled += count
        return zlib.crc32(target) == checksum
