"""Complaints about what a user asked for, collected so that all of them are told at once."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path


class ConfigError(ValueError):
    """Everything that is wrong with a request, one sentence each in `problems`."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def raise_joined(problems: Iterable[str]) -> None:
    """Raise one `ConfigError` with all `problems`; do nothing when there are none."""
    found = list(problems)
    if found:
        raise ConfigError(found)


def problems_of(error: ValueError) -> list[str]:
    """The sentences that `error` carries: a `ConfigError`'s own list, else its text as one."""
    return error.problems if isinstance(error, ConfigError) else [str(error)]


@contextlib.contextmanager
def naming(place: str | os.PathLike[str]) -> Iterator[None]:
    """Let sentences of a `ValueError` in the block begin with `place`, a file or folder, where they do not say it."""
    path = str(Path(place))
    # As a whole, for a folder may be named bert, and a sentence say what a bert is.
    said = re.compile(rf"(?<![\w./-]){re.escape(path)}[:/]")
    try:
        yield
    except ValueError as error:
        raise ConfigError(p if said.search(p) else f"{path}: {p}" for p in problems_of(error)) from error
