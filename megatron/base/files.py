"""Files that appear whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames and new names inside the folder `path` survive a power cut, where its file system offers that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot do this for a folder; they order renames by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """A hidden name beside `path` under which to write its content first: `.NAME.RANDOM.tmp`.

    Each call gives another one, so that writers in other threads, processes and hosts of a shared file system do not
    meet in it.
    """
    target = Path(path)
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def folder_problem(path: str | os.PathLike[str]) -> str | None:
    """Why nothing can be written into the folder `path`, or why it cannot be made; None as far as can be seen."""
    there = next(place for place in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"this process may not write in {there}"


def file_problem(path: str | os.PathLike[str]) -> str | None:
    """Why no file can be written to `path`, whose folder must exist; None as far as can be seen."""
    folder = Path(path).parent
    if Path(path).is_dir():
        return "it is a folder, and must be a file"
    if not folder.is_dir():
        return f"it must be a file in a folder that exists, and there is no folder {folder}"
    return folder_problem(folder)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make the folder `path` where it is missing; after an error in the block, take away those made that are empty."""
    folder = Path(path)
    made = [place for place in (folder, *folder.parents) if not place.exists()]  # the deepest first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that takes the name `path` only when the block ends without an error.

    The content is flushed to disk before the rename, and the rename itself after it; a file that stood at `path`
    stays as it was until then. After an error nothing is left; a process killed in the block leaves the hidden file of
    `temporary_name`, which nothing reads. `mode` is "w" (UTF-8 text) or "wb".
    """
    assert mode in ("w", "wb"), mode
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
