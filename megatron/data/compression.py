"""Compressed files as streams of what they hold; damage anywhere in them is told and nothing is left out in silence."""

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

try:
    from backports import zstd
except ImportError:  # part of the standard library from Python 3.14 on
    zstd = importlib.import_module("compression.zstd")


def _zstandard() -> Any:
    """A decompressor that takes every window (`zstd --long`), by itself the library refuses those beyond 128 MiB."""
    parameter = zstd.DecompressionParameter.window_log_max
    return zstd.ZstdDecompressor(options={parameter: parameter.bounds()[1]})


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".xz": lzma.LZMADecompressor,
    ".bz2": bz2.BZ2Decompressor,
    ".zst": _zstandard,
}
ENDINGS = (".gz", *_DECOMPRESSORS)
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_BUFFER = 1 << 20


def ending_of(path: str) -> str:
    """`.gz`, `.xz`, `.bz2` or `.zst` where the name ends in it, else nothing."""
    ending = os.path.splitext(path)[1]
    return ending if ending in ENDINGS else ""


@contextlib.contextmanager
def open_unpacked(path: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """What a file holds, by the ending of its name, and the file as it is stored (whose position tells the progress).

    ValueError, naming the file, where the compression is damaged or cut short while the block reads it.
    """
    with open(path, "rb") as stored:
        try:
            yield _unpacked(path, stored), stored
        except _DAMAGE as error:
            raise ValueError(f"{path} is cut short or damaged: {error}") from None


def _unpacked(path: str, stored: IO[bytes]) -> IO[bytes]:
    ending = ending_of(path)
    if not ending:
        return stored
    if os.fstat(stored.fileno()).st_size == 0:
        raise EOFError("it has no bytes")
    # behind a buffer that hands out lines fast
    if ending == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=stored, mode="rb"), _BUFFER)
    return io.BufferedReader(_Unpacked(stored, _DECOMPRESSORS[ending]), _BUFFER)


class _Unpacked(io.RawIOBase):
    """The content of compressed streams that stand one behind another.

    (The readers of the standard library take what follows a stream and is none for an end of the file.)
    """

    def __init__(self, stored: IO[bytes], make: Callable[[], Any]) -> None:
        self._stored, self._make = stored, make
        self._current = make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            data = self._next_input()
            if data is None:
                return 0
            found = self._current.decompress(data, len(view))
            if found:
                view[: len(found)] = found
                return len(found)

    def _next_input(self) -> bytes | None:
        """What the decompressor is to be given next, None at the end of the file."""
        if self._current.eof:
            # padding with zeros is allowed between streams
            data = self._current.unused_data.lstrip(b"\0") or self._stored.read(_BUFFER).lstrip(b"\0")
            if data:
                self._current = self._make()
            return data or None
        if not self._current.needs_input:
            return b""
        data = self._stored.read(_BUFFER)
        if not data:
            raise EOFError("it ends inside a compressed stream")
        return data
