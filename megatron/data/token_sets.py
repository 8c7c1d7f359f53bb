"""Opening the token sets of a blend, a thousand of them included."""

import resource

from megatron.base.complaints import problems_of, raise_joined
from megatron.data.blend import Blend
from megatron.data.indexed import IndexedDataset

# A map keeps its file open: .bin and .idx, and three arrays for each of three shares.
_FILES_OF_A_SET = 11
_FILES_BESIDE = 512  # for all else that a run opens


def open_token_sets(blend: Blend, name: str) -> list[IndexedDataset]:
    """The token sets of `blend`, opened without reading their whole index.

    Raises `ConfigError` with a sentence for each that cannot be read, which tells the flag `name`.
    """
    allow_open_files(_FILES_OF_A_SET * len(blend.prefixes) + _FILES_BESIDE)
    opened, found = [], []
    for prefix in blend.prefixes:
        try:
            opened.append(IndexedDataset(prefix, verify=False))
        except ValueError as error:
            found.append(f"{name} {prefix}: {error}")
    raise_joined(found)
    return opened


def token_set_problems(blend: Blend, name: str) -> list[str]:
    """What is wrong with the token sets of `blend`, as far as opening them tells."""
    try:
        open_token_sets(blend, name)
    except ValueError as error:
        return problems_of(error)
    return []


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as the system lets it; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
