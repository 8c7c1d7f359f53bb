"""Lines that ranks write into one pipe: each comes whole, even where Python's streams have no buffer."""

import io
import sys
from collections.abc import Callable

import pytest

from megatron.base.console import say
from megatron.training.failure import print_problems
from megatron.training.observers import Console


class Pipe(io.RawIOBase):
    """Keeps what each write to it brings."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if len(data):
            self.written.append(bytes(data))
        return len(data)


def unbuffered(pipe: Pipe) -> io.TextIOWrapper:
    """A text stream as PYTHONUNBUFFERED makes it: what comes is written on at once."""
    return io.TextIOWrapper(pipe, write_through=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (lambda: say("one\ntwo"), "one\ntwo\n"),
        (lambda: say("one", sys.stderr), "one\n"),
        (lambda: Console().on_message("one"), "one\n"),
        (lambda: print_problems(OSError("one")), "error: one\n"),
        (lambda: print_problems(OSError(9, "closed", "a file")), "error: a file: closed\n"),
        (lambda: print_problems(OSError(9, "closed", 3)), "error: 3: closed\n"),
    ],
)
def test_a_line_and_its_end_are_one_write(
    monkeypatch: pytest.MonkeyPatch, tell: Callable[[], None], expected: str
) -> None:
    pipe = Pipe()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, unbuffered(pipe))
    tell()
    monkeypatch.undo()
    assert pipe.written == [expected.encode()]
