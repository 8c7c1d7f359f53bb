"""What the launcher of the ranks says in the environment."""

import dataclasses
import os
from typing import Self


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among those that a launcher has started: rank, rank on its node, and number of ranks."""

    rank: int
    local_rank: int
    size: int

    @classmethod
    def of_environment(cls) -> Self:
        """By RANK, LOCAL_RANK and WORLD_SIZE, as `torchrun` sets them; one rank alone where there is no launcher.

        Raises ValueError where one of them or MASTER_PORT is no number, or they contradict each other.
        """
        if "RANK" in os.environ:
            _number("MASTER_PORT", 0)  # where the ranks meet
        found = cls(_number("RANK", 0), _number("LOCAL_RANK", 0), _number("WORLD_SIZE", 1, least=1))
        if found.size > 1 and "RANK" not in os.environ:
            raise ValueError(f"WORLD_SIZE {found.size}: there is no RANK beside it; the launcher must set both or none")
        if found.rank >= found.size:
            raise ValueError(f"RANK {found.rank}: the launcher must set it to a number below WORLD_SIZE, {found.size}")
        return found


def launched_ranks() -> int:
    """The number of ranks; 1 where there is no launcher. ValueError as of `Launch.of_environment`."""
    return Launch.of_environment().size


def local_rank() -> int:
    """The number of this rank on its node; 0 where there is no launcher. ValueError as of `Launch.of_environment`."""
    return Launch.of_environment().local_rank


def speaks_for_node() -> bool:
    """Whether this rank tells what all of its node see alike: the first does, and one that does not know its number."""
    try:
        return local_rank() == 0
    except ValueError:
        return True


def _number(name: str, default: int, least: int = 0) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name} {text}: the launcher must set it to a whole number of at least {least}, or not at all"
        )
    return int(text)
