"""Encoded text to token sets: in one go, or in parts that processes write by themselves and that are put together."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.data.corpus import Encoded, WorkerPool, encode_sources, worker_encoder
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
    """Writers of all sets; the sets appear, all or none, when the block ends without an error."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, output.dtype)) for prefix in output.prefixes]
        yield writers
        for writer in writers:  # all are on disk before the first appears
            writer.complete()


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
    pool: WorkerPool,
    bad: BadRecords,
    advance: Advance,
) -> None:
    """Append what `partitions` hold: each is read, encoded and written by one process into sets of its own.

    The sets of the parts lie in a hidden folder beside the output and are gone in the end.
    The result, bad records included, is that of one run over all. After an error, in any part, nothing is waited for:
    the processes are ended.
    """
    target = Path(output.prefixes[0])
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".parts", dir=target.parent))
    try:
        parts, futures = [], []
        for number, sources in enumerate(partitions):
            parts.append(output._replace(prefixes=[str(folder / f"{number}_{k}") for k in range(len(output.keys))]))
            futures.append(pool.submit(_write_part, list(sources), parts[-1], bad.fail))
        for k in _done_in_order(futures):
            done = futures[k].result()
            bad.merge(done.bad)
            _take_over(writers, parts[k])
            advance(done.documents, done.bytes)
        pool.shutdown()
    except BaseException:
        pool.end_now()  # before the folder goes: processes write in it
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _done_in_order(futures: Sequence[Future[Any]]) -> Iterator[int]:
    """The numbers of the futures in their order, each when it is done; raises as soon as any of them has failed."""
    first = 0
    for future in as_completed(futures):
        future.result()
        while first < len(futures) and futures[first].done():
            yield first
            first += 1


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
