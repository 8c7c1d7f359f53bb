"""Reads pieces from safetensors files, only the blocks that are needed, each verified against its checksum."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatron.base.rectangles import Rectangle, intersection, rectangles_of_range
from megatron.checkpointing.checksum import CHUNK_BYTES, crc32
from megatron.checkpointing.errors import DamageError, unreadable_is_damage
from megatron.checkpointing.header import read_header
from megatron.checkpointing.index import StoredPiece, StoredTensor, dtype_of

# Threads that read: as many as PyTorch would copy with, but while one waits for the disk another has something to do.
_LEAST_THREADS, _MOST_THREADS = 2, 8


# A stored tensor, and where its values are wanted: rectangles of it, and tensors of their shapes.
Request = tuple[StoredTensor, Sequence[tuple[Rectangle, Tensor]]]


class PieceReader:
    """The files of one checkpoint folder. Context manager; keeps files open and, for each thread, a chunk of bytes.

    Values go straight from the file to where they are wanted if that is contiguous memory of the CPU, so that a target
    may hold damaged values after an error. A target of another dtype gets them rounded. Raises `DamageError`, naming
    the file and the tensor, where a file is not what the index says.
    """

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._files: dict[str, _PieceFile] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, requests: Iterable[Request]) -> None:
        """Copy stored values to where they are wanted. The blocks are shared among a few threads."""
        pool = _threads()
        try:
            for done in [pool.submit(block.read) for block in self._blocks(requests)]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def problems(self, tensors: Iterable[StoredTensor]) -> Iterator[str]:
        """Read every block; a sentence for each that is not what was saved."""
        with _threads() as pool:
            for tensor in tensors:
                for piece in tensor.pieces:
                    try:
                        blocks = [pool.submit(block.read) for block in self._blocks_of(tensor, piece, None)]
                    except DamageError as error:
                        yield str(error)
                        continue
                    failures = [block.exception() for block in blocks]
                    yield from (str(failure) for failure in failures if failure is not None)

    def _blocks(self, requests: Iterable[Request]) -> Iterator["_Block"]:
        """The stored blocks that hold something wanted."""
        for tensor, targets in requests:
            for piece in tensor.pieces:
                touched = [(r, values) for r, values in targets if intersection(r, piece.rectangle) is not None]
                if touched:
                    yield from self._blocks_of(tensor, piece, touched)

    def _blocks_of(
        self, tensor: StoredTensor, piece: StoredPiece, targets: Sequence[tuple[Rectangle, Tensor]] | None
    ) -> Iterator["_Block"]:
        """The blocks of a piece that hold what is in `targets`; all of them where that is None."""
        file = self._open(piece.file)
        dtype = dtype_of(tensor.dtype)
        begin = file.begin(tensor, piece, self._block_bytes)
        step = self._block_bytes // dtype.itemsize
        for number, checksum in enumerate(piece.checksums):
            first = number * step
            parts = _parts(piece.rectangle, first, min(first + step, piece.rectangle.size))
            if targets is None or any(intersection(part, r) for part in parts for r, _ in targets):
                words = f"tensor {tensor.name} does not match its checksum (block {number})"
                yield _Block(file, begin + first * dtype.itemsize, dtype, parts, targets or (), checksum, words)

    def _open(self, name: str) -> "_PieceFile":
        if name not in self._files:
            self._files[name] = self._stack.enter_context(_PieceFile(self._folder / name))
        return self._files[name]


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block at byte `begin` of a file: `parts` of a tensor one after another, wanted by `targets`."""

    file: "_PieceFile"
    begin: int
    dtype: torch.dtype
    parts: Sequence[Rectangle]
    targets: Sequence[tuple[Rectangle, Tensor]]
    checksum: int
    complaint: str

    def read(self) -> None:
        """Copy it to where it is wanted. Raises `DamageError` with the complaint where it is not what was saved."""
        position, checksum = self.begin, 0
        for part in self.parts:
            checksum = self._read_part(part, position, checksum)
            position += part.size * self.dtype.itemsize
        if checksum != self.checksum:
            raise DamageError(f"{self.file.path}: {self.complaint}")

    def _read_part(self, part: Rectangle, position: int, checksum: int) -> int:
        """Read the elements of `part` at byte `position`; returns `checksum` with theirs added."""
        whole = _whole_target(part, self.targets, self.dtype)
        if whole is not None:
            return self.file.read(position, whole, checksum)
        step = CHUNK_BYTES // self.dtype.itemsize
        buffer = torch.empty(min(step, part.size), dtype=self.dtype)
        for first in range(0, part.size, step):
            values = buffer[: part.size - first]
            checksum = self.file.read(position + first * self.dtype.itemsize, values.view(torch.uint8), checksum)
            _scatter(values, _parts(part, first, first + len(values)), self.targets)
        return checksum


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(_LEAST_THREADS, min(torch.get_num_threads(), _MOST_THREADS)), "checkpoint-reader")


def _parts(piece: Rectangle, first: int, last: int) -> list[Rectangle]:
    """Elements `first` to `last` of a piece in row-major order, as rectangles of the tensor."""
    return [
        Rectangle(tuple(o + p for o, p in zip(part.offset, piece.offset, strict=True)), part.shape)
        for part in rectangles_of_range(piece.shape, first, last)
    ]


def _whole_target(part: Rectangle, targets: Sequence[tuple[Rectangle, Tensor]], dtype: torch.dtype) -> Tensor | None:
    """The bytes, uint8 and 1-D, of the one target of `dtype` that wants all of `part` in contiguous memory, if any."""
    wanting = [(r, target) for r, target in targets if intersection(part, r) is not None]
    if len(wanting) != 1 or intersection(part, wanting[0][0]) != part:
        return None
    rectangle, target = wanting[0]
    values = target[part.slices(rectangle.offset)]
    if values.dtype != dtype or values.device.type != "cpu" or not values.is_contiguous():
        return None
    # Of a single element, as_strided gives the stride 1 that `view` of another size wants.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


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
        with contextlib.ExitStack() as stack, unreadable_is_damage(path):
            self._stream = stack.enter_context(open(path, "rb", buffering=0))
            try:
                self._spans = read_header(self._stream)
            except ValueError as error:
                raise DamageError(f"{path}: {error}") from error
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, tensor: StoredTensor, piece: StoredPiece, block_bytes: int) -> int:
        """Position of a piece's first byte, once the header has said of the piece what the index says."""
        key = piece.key(tensor.name)
        span = self._spans.get(key)
        if span is None or (span.dtype, span.shape) != (tensor.dtype, piece.rectangle.shape):
            raise DamageError(f"{self.path}: its header does not have {key} as the index describes it")
        if len(piece.checksums) != math.ceil((span.end - span.begin) / block_bytes):
            raise DamageError(f"{self.path}: the index does not have one checksum for each block of {key}")
        return span.begin

    def read(self, position: int, target: Tensor, checksum: int) -> int:
        """Fill `target`, uint8 and 1-D, with the bytes at `position`; returns `checksum` with theirs added."""
        content = target.numpy().data
        with unreadable_is_damage(self.path):
            for begin in range(0, len(content), CHUNK_BYTES):
                chunk = content[begin : begin + CHUNK_BYTES]
                self._read_exactly(position + begin, chunk)
                checksum = crc32(chunk, checksum)
        return checksum

    def _read_exactly(self, position: int, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            count = os.preadv(self._stream.fileno(), [target[filled:]], position + filled)
            if not count:
                raise DamageError(f"{self.path}: it ends before byte {position + len(target)}")
            filled += count
