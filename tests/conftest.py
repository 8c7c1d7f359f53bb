"""Fixtures of all tests: `ranks` (functions on gloo ranks) and `shared` (reference data beside the repository)."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.check_all_ran import SHARED_ABSENT
from tests.harness.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent

# The machine's speed is not tested. Every run tries the same examples, so that a change alone makes a test fail;
# `pytest --hypothesis-profile random` looks for others.
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", derandomize=True, database=None, **_UNTIMED)
hypothesis.settings.register_profile("random", derandomize=False, **_UNTIMED)
hypothesis.settings.load_profile("default")

# What a shell starts in its background ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(n, function, *args, timeout=120)`: run `function(rank, n, *args)` on n ranks, return their results."""
    with Ranks() as pool:
        yield pool


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the repository; a test that needs it skips where it is absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{SHARED_ABSENT}: there is no folder ../{folder.name}")
    return folder
