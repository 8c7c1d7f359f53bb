"""How a run ends when something is wrong: exit code 2 and sentences for mistakes, one message from all ranks."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from megatron.base.complaints import ConfigError, problems_of
from megatron.base.console import say
from megatron.checkpointing.errors import SaveError
from megatron.training.launcher import speaks_for_node

_KEY = "megatron/first-failure"

# What all ranks raise alike: one tells it, in sentences and without a traceback, and with this code the run ends.
_TOLD_BY_ONE = {ConfigError: 2, SaveError: 1}

# Seconds for which ranks other than a node's first leave it to tell a mistake that all of them see alike.
_SILENT_WAIT = 20.0
# Seconds that the rank which failed first has for its traceback before another one ends.
_GRACE = 1.0


class Store(Protocol):
    """What is needed of a `torch.distributed` store: keep a value where there is none, and give the one kept."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


# What Ctrl-C costs a program that trains.
TRAINING_LOST = "what was done since the last checkpoint is lost"


@contextlib.contextmanager
def user_errors(lost: str = "") -> Iterator[None]:
    """Turn a `ValueError` or `OSError` inside the block into its sentences on stderr and exit code 2; Ctrl-C into 130.

    For the part of a run before any process group exists, where mostly every rank sees the same mistake. Under a
    launcher the first rank of each node speaks and the launcher ends the others, which wait for that before they speak.
    `lost` says what Ctrl-C costs, such as `TRAINING_LOST`; nothing if empty.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if not speaks_for_node():
            time.sleep(_SILENT_WAIT)
        print_problems(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if speaks_for_node():
            say(": ".join(filter(None, ("interrupted", lost))), sys.stderr)
        raise SystemExit(130) from None


def exit_code(work: Callable[[], None]) -> int:
    """Do the work of a tool; 0, or 2 where a `ValueError` or `OSError`, the user's mistake, is said in sentences."""
    try:
        work()
    except (ValueError, OSError) as error:
        print_problems(error)
        return 2
    return 0


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """For parts of a run in which a `ValueError` or `OSError` is the user's mistake: raise it as a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(problems_of(error)) from error
    except OSError as error:
        raise ConfigError([_words_of_system(error)]) from error
    except MemoryError as error:
        raise ConfigError([f"there is not enough memory for what is asked ({error})"]) from error


def print_problems(error: Exception) -> None:
    """Write the sentences of `error` to stderr, one a line; of what a file says no control character reaches it."""
    problems = problems_of(error) if isinstance(error, ValueError) else [_words_of_system(error)]
    for problem in problems:
        shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in problem)
        say(f"error: {shown}", sys.stderr)


def _words_of_system(error: Exception) -> str:
    """The file and what is wrong with it, where an `OSError` says both; else the error's own words."""
    if isinstance(error, OSError) and error.filename and error.strerror and error.filename2 is None:
        # Of a file that is open already it is a number.
        name = str(error.filename) if isinstance(error.filename, int) else os.fsdecode(error.filename)
        return f"{name}: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def shared_failure(store: Store, rank: int) -> Iterator[None]:
    """Make the ranks of a run end with the message of the one that failed first.

    An exception inside the block is offered to `store`, which keeps the first. The rank whose message it is writes its
    traceback and exits with 1. For a `ConfigError`, which is the user's mistake, it writes sentences and exits with 2,
    for a `SaveError` its sentence and exits with 1.
    Every other rank, which mostly fails because a collective lost its peer, says the first message and exits with 1.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        own = f"rank {rank}: {type(error).__name__}: {error}"
        code = next((code for kind, code in _TOLD_BY_ONE.items() if isinstance(error, kind)), None)
        first = _first_failure(store, own)
        if first != own:
            _leave_the_word(first, rank, code)
        if isinstance(error, SystemExit):
            raise
        if code is not None:
            print_problems(error)
            raise SystemExit(code) from None
        say(traceback.format_exc().rstrip("\n"), sys.stderr)
        raise SystemExit(1) from None


def _leave_the_word(first: str, rank: int, shared_code: int | None) -> NoReturn:
    """End this rank behind the one that failed first, whose words a launcher would cut off by ending all ranks.

    What all ranks see alike, and end with `shared_code` for, the first one tells, and the launcher ends the others
    meanwhile.
    """
    if shared_code is not None:
        time.sleep(_SILENT_WAIT)
    say(f"rank {rank} stops because of {first}", sys.stderr)
    time.sleep(_GRACE)
    raise SystemExit(1 if shared_code is None else shared_code) from None


def _first_failure(store: Store, own: str) -> str:
    """The message that `store` has kept, which is `own` where it is the first or the store is gone."""
    try:
        return store.compare_set(_KEY, "", own).decode()
    except (RuntimeError, OSError):  # the store ended with its host
        return own
