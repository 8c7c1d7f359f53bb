"""Encoded text to token sets: in one go, or in parts that processes write by themselves and that are put together."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.data.corpus import Encoded, encode_sources, worker_encoder
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.merging import append_set
from megatron.data.records import BadRecords, Source

Advance = Callable[[int, int], object]  # documents, bytes of the input


class Output(NamedTuple):
    """What a run writes: a token set under each of `prefixes`, one a key."""

    prefixes: list[str]
    keys: list[str]
    dtype: np.dtype


@contextlib.contextmanager
def open_writers(output: Output) -> Iterator[list[IndexedWriter]]:
    """Writers of all sets; the sets appear when the block ends without an error."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(IndexedWriter(prefix, output.dtype)) for prefix in output.prefixes]


def write_encoded(
    writers: Sequence[IndexedWriter], parts: Iterable[Encoded], bad: BadRecords, advance: Advance
) -> None:
    """Append what `parts` hold, a set for each key, and count bad records."""
    for part in parts:
        for kind, number in part.bad:
            bad.add(kind, part.source, number)
        for writer, tokens, sizes, counts in zip(writers, part.tokens, part.sizes, part.counts, strict=True):
            writer.add_documents(tokens, sizes, counts)
        advance(part.documents, part.bytes)


def write_partitions(
    writers: Sequence[IndexedWriter],
    output: Output,
    partitions: Iterable[Sequence[Source]],
    pool: ProcessPoolExecutor,
    bad: BadRecords,
    advance: Advance,
) -> None:
    """Append what `partitions` hold: each is read, encoded and written by one process into sets of its own.

    `pool` is of `start_pool`. The sets of the parts lie in a hidden folder beside the output and are gone in the end.
    The result, bad records included, is that of one run over all.
    """
    target = Path(output.prefixes[0])
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".parts", dir=target.parent))
    try:
        futures = []
        for number, sources in enumerate(partitions):
            part = output._replace(prefixes=[str(folder / f"{number}_{k}") for k in range(len(output.keys))])
            futures.append((part, pool.submit(_write_part, list(sources), part, bad.fail)))
        for part, future in futures:
            done = future.result()
            bad.merge(done.bad)
            _take_over(writers, part)
            advance(done.documents, done.bytes)
    finally:
        pool.shutdown(cancel_futures=True)  # before the folder goes: processes write in it
        shutil.rmtree(folder, ignore_errors=True)


class _Done(NamedTuple):
    documents: int
    bytes: int
    bad: BadRecords


def _write_part(sources: list[Source], output: Output, fail: bool) -> _Done:
    """Run in a worker process: the sets of one part."""
    bad, counts = BadRecords(fail), [0, 0]

    def advance(documents: int, size: int) -> None:
        counts[0] += documents
        counts[1] += size

    with open_writers(output) as writers:
        write_encoded(writers, encode_sources(sources, output.keys, worker_encoder, 1), bad, advance)
    return _Done(counts[0], counts[1], bad)


def _take_over(writers: Sequence[IndexedWriter], part: Output) -> None:
    for writer, prefix in zip(writers, part.prefixes, strict=True):
        append_set(writer, IndexedDataset(prefix))
        for ending in ("bin", "idx"):
            os.unlink(f"{prefix}.{ending}")
