"""What the launcher of the ranks says in the environment."""

import os


def launched_ranks() -> int:
    """The number of ranks, WORLD_SIZE; 1 where no launcher has set it. ValueError where it is no number of ranks."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE {text}: the launcher must set it to a whole number of at least 1, or not at all")
    return int(text)
