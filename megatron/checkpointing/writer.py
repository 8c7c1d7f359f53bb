"""Writes the pieces of one rank as a safetensors file, block by block, with a checksum for each block."""

import contextlib
import dataclasses
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Self

import torch
from torch import Tensor

from megatron.base.rectangles import Rectangle, rectangles_of_range
from megatron.checkpointing.checksum import CHUNK_BYTES, crc32
from megatron.checkpointing.errors import naming_file
from megatron.checkpointing.header import make_header
from megatron.checkpointing.index import StoredPiece, dtype_name


@dataclasses.dataclass(frozen=True)
class NewPiece:
    """A rectangle of tensor `name` that is to be written, with its values."""

    name: str
    rectangle: Rectangle
    values: Tensor


def write_pieces(path: Path, pieces: Sequence[NewPiece], block_bytes: int) -> list[tuple[str, StoredPiece]]:
    """Write a new safetensors file with `pieces` and flush it to disk; returns what was stored, by tensor name.

    The format is that of `safetensors.torch.save_file`. It is written here so that values on a device, or not
    contiguous, never need a second copy of a rank's whole share, and so that each checksum is taken of the very bytes
    that are written. `block_bytes` is a multiple of 8.
    """
    # Wide elements first, which keeps every piece aligned to its own element size.
    ordered = sorted(pieces, key=lambda piece: (-piece.values.element_size(), piece.name, piece.rectangle))
    stored = []
    with naming_file(path), open(path, "xb") as stream:
        stream.write(_header(ordered, path.name))
        with _Flusher(stream.fileno(), block_bytes) as flusher:
            for piece in ordered:
                checksums = tuple(_write_block(stream, block, flusher) for block in _blocks(piece.values, block_bytes))
                stored.append((piece.name, StoredPiece(path.name, piece.rectangle, checksums)))
        stream.flush()
        os.fsync(stream.fileno())
    return stored


class _Flusher:
    """Has a thread send to the disk what is written already, a block after another, while more is being written.

    So the disk is at work from the first block on, and little is left for the fsync at the end. What is on the disk
    leaves the page cache, so that a save takes a few blocks of it, again and again, however large it is: to find memory
    for the whole file can take the system longer than to write it. Context manager, whose end waits for the thread.
    Raises OSError, as soon as it is known, where the disk has failed: the system tells that once, so that the fsync at
    the end may not hear of it.
    """

    def __init__(self, descriptor: int, block_bytes: int) -> None:
        self._descriptor, self._block_bytes = descriptor, block_bytes
        self._unflushed = 0
        self._failure: OSError | None = None
        self._asked = queue.SimpleQueue[bool]()
        self._thread = threading.Thread(target=self._flush, name="checkpoint-flusher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._asked.put(False)
        self._thread.join()
        if kind is None:
            self._check()

    def written(self, size: int) -> None:
        """Take note of bytes that were written."""
        self._check()
        self._unflushed += size
        if self._unflushed >= self._block_bytes and self._asked.empty():
            self._asked.put(True)
            self._unflushed = 0

    def _flush(self) -> None:
        while self._asked.get():
            try:
                getattr(os, "fdatasync", os.fsync)(self._descriptor)  # not every system has the first
                _forget(self._descriptor)
            except OSError as error:
                self._failure = self._failure or error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _forget(descriptor: int) -> None:
    """Let go of what the page cache has of a file and the disk too. A wish: where it cannot be, nothing is lost."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _header(pieces: Sequence[NewPiece], file: str) -> bytes:
    keys = [StoredPiece(file, piece.rectangle, ()).key(piece.name) for piece in pieces]
    return make_header(
        (key, dtype_name(piece.values.dtype), piece.values.shape) for key, piece in zip(keys, pieces, strict=True)
    )


def _blocks(values: Tensor, block_bytes: int) -> Iterator[Tensor]:
    """The values as bytes on the CPU, uint8 and 1-D, a block at a time; each is good until the next is asked for."""
    values = values.detach()
    step = block_bytes // values.element_size()
    in_place = values.is_contiguous() and values.device.type == "cpu"
    memory = torch.empty(0 if in_place else min(step, values.numel()), dtype=values.dtype)
    for begin in range(0, values.numel(), step):
        end = min(begin + step, values.numel())
        block = _flat(values)[begin:end] if in_place else _copied(values, begin, memory[: end - begin])
        yield block.view(torch.uint8)


def _flat(values: Tensor) -> Tensor:
    """The same memory as contiguous `values`, 1-D, and with the stride 1 that viewing it as bytes wants."""
    return values.as_strided((values.numel(),), (1,))


def _copied(values: Tensor, begin: int, target: Tensor) -> Tensor:
    """`target`, 1-D, filled with the values from element `begin` on in row-major order; no more than that is made."""
    if values.is_contiguous():
        return target.copy_(_flat(values)[begin : begin + len(target)])
    origin = (0,) * values.dim()
    parts = list(rectangles_of_range(tuple(values.shape), begin, begin + len(target)))
    for part, place in zip(parts, target.split([part.size for part in parts]), strict=True):
        place.view(part.shape).copy_(values[part.slices(origin)])
    return target


def _write_block(stream: IO[bytes], block: Tensor, flusher: _Flusher) -> int:
    """Write bytes and have them flushed; returns their checksum."""
    content, checksum = block.numpy().data, 0
    for begin in range(0, len(content), CHUNK_BYTES):
        chunk = content[begin : begin + CHUNK_BYTES]
        checksum = crc32(chunk, checksum)
        stream.write(chunk)
    flusher.written(len(content))
    return checksum
