"""What may go wrong with a checkpoint, told apart by what can be done about it."""

import contextlib
import os
from collections.abc import Iterator


class DamageError(ValueError):
    """A checkpoint is not what was saved: a file is missing, cut or changed. An earlier one may be whole."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved. The earlier ones and the tracker are as they were."""


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an OSError in the block name `path` where it names no file, as that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def unreadable_is_damage(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise `DamageError` naming `path` for an OSError in the block, such as that of a disk with a bad sector."""
    try:
        yield
    except OSError as error:
        raise DamageError(f"{path}: it cannot be read: {error}") from error
