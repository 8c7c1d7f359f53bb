"""What the launcher of the ranks says in the environment."""

import dataclasses
import os
from typing import Self


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among those that a launcher has started: its rank, and the number of ranks."""

    rank: int
    size: int

    @classmethod
    def of_environment(cls) -> Self:
        """By RANK and WORLD_SIZE, as `torchrun` sets them; one rank alone where there is no launcher.

        Raises ValueError where one of them, LOCAL_RANK or MASTER_PORT is no number, or they contradict each other.
        """
        if "RANK" in os.environ:
            _number("MASTER_PORT", 0)  # where the ranks meet
        local_rank()  # which is asked for later
        found = cls(_number("RANK", 0), _number("WORLD_SIZE", 1, least=1))
        both = "the launcher must set both or none"
        if found.size > 1 and "RANK" not in os.environ:
            raise ValueError(f"WORLD_SIZE {found.size}: there is no RANK beside it; {both}")
        if found.rank > 0 and "WORLD_SIZE" not in os.environ:
            raise ValueError(f"RANK {found.rank}: there is no WORLD_SIZE beside it; {both}")
        if found.rank >= found.size:
            raise ValueError(f"RANK {found.rank}: the launcher must set it to a number below WORLD_SIZE, {found.size}")
        return found


def launched_ranks() -> int:
    """The number of ranks; 1 where there is no launcher. ValueError as of `Launch.of_environment`."""
    return Launch.of_environment().size


def local_rank() -> int:
    """The number of this rank on its node, LOCAL_RANK; 0 where it is not set. ValueError where it is no number.

    The rest of the environment is not looked at: a program that has made the process group itself need not follow it.
    """
    return _number("LOCAL_RANK", 0)


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
    text = text.strip()  # as `wc -l` of a list of hosts may have it
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name} {text}: the launcher must set it to a whole number of at least {least}, or not at all"
        )
    return int(text)
