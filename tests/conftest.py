"""Fixtures of all tests: `ranks` (functions on gloo ranks) and `shared` (reference data beside the repository)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent


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
        pytest.skip(f"the reference data of this test is not on this machine: there is no folder ../{folder.name}")
    return folder
