"""Memory that runs out while a run is set up: one sentence, in place of PyTorch's words and a traceback."""

import contextlib
from collections.abc import Iterator

import torch

from megatron.base.complaints import ConfigError

# PyTorch's words where the CPU's memory does not suffice, or where a size has more than 64 bits; no class tells them.
_WORDS = ("DefaultCPUAllocator: ", "calculation overflowed", "multiplication overflow")


@contextlib.contextmanager
def memory_needed(what: str) -> Iterator[None]:
    """Raise a `ConfigError` where there is not the memory that the block asks for; it also serves as a decorator."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in _WORDS):
            raise
        said = str(error).splitlines()[0].rpartition("Allocator: ")[2]
        smaller = "make it smaller, or spread it over more ranks"
        raise ConfigError([f"there is not enough memory for {what} ({said}): {smaller}"]) from error
