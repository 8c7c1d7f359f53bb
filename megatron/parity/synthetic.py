"""Tokens made up for a run that is about its layout, not its data."""

from pathlib import Path

import numpy as np

from megatron.data.indexed import IndexedWriter

VOCAB_SIZE = 100
EOD = VOCAB_SIZE - 1


def write_documents(prefix: Path, count: int = 120, seed: int = 0) -> str:
    """A token set of `count` documents in which a token mostly follows from the one before; each ends with EOD."""
    random = np.random.default_rng(seed)
    follower = random.permutation(EOD)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in random.integers(1, 60, count):
            tokens = [int(random.integers(EOD))]
            for jump in random.random(length - 1) < 0.2:
                tokens.append(int(random.integers(EOD)) if jump else int(follower[tokens[-1]]))
            writer.add_document([*tokens, EOD])
    return str(prefix)
