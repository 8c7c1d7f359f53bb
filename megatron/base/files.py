"""Files that appear whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames and new names inside the folder `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """The hidden name beside `path` under which its content is written first; unique to this process."""
    target = Path(path)
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that takes the name `path` only when the block ends without an error.

    The content is flushed to disk before the rename, and the rename itself after it; a file that stood at `path`
    stays as it was until then. `mode` is "w" (UTF-8 text) or "wb".
    """
    temporary = temporary_name(path)
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(Path(path).parent)
