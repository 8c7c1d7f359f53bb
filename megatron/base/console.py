"""Lines on a terminal or in a log that several processes write to."""

import sys
from typing import IO


def say(text: str, stream: IO[str] | None = None) -> None:
    """Write `text` and the end of its last line at once to `stream`, standard output if None, and flush it.

    `print` writes the end by itself where the stream has no buffer (PYTHONUNBUFFERED), so that the lines of ranks that
    share a pipe or a file would mix.
    """
    print(f"{text}\n", end="", file=stream or sys.stdout, flush=True)
