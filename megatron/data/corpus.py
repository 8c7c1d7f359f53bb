"""From files of text to token ids, on as many processes as wanted, in the order of the files."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron.data.inputs import read_chunks
from megatron.data.pieces import PIECE, pieces
from megatron.data.records import NO_IDS, Chunk, Source, documents_of

_CHUNK_BYTES = 1 << 18
_CHUNKS_AHEAD = 4  # chunks a worker that wait or are done before their turn
_BYTES_AHEAD = 1 << 26  # of text in them together, where single records are huge
_BATCH = 2 * PIECE  # characters that are tokenised together


class BatchTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> Sequence[int]: ...

    def tokenize_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...


class Encoded(NamedTuple):
    """The documents of one chunk.

    For key k: `tokens[k]` are the ids of all sequences, one after another; `sizes[k]` int64 [sequences] their lengths;
    `counts[k]` int64 [documents] the sequences of each document.
    """

    tokens: list[np.ndarray]
    sizes: list[np.ndarray]
    counts: list[np.ndarray]
    source: Source
    bad: list[tuple[str, int]]  # kind and number of each record that was skipped
    bytes: int  # of the stored file that the chunk took

    @property
    def documents(self) -> int:
        """Documents under each key."""
        return len(self.counts[0])


class Encoder:
    """Turns chunks into ids: one document a record under each of `keys`, `append_eod` a last id for each document.

    A record that lacks a text under any key is skipped for all of them, so that the sets of two keys stay in step.
    `split` cuts a text into sentences, each of which becomes a sequence; without it a document is one sequence.
    """

    def __init__(
        self,
        tokenizer: BatchTokenizer,
        keys: Sequence[str],
        append_eod: bool,
        dtype: np.dtype,
        split: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.keys = keys
        self.dtype = dtype
        self.eod = tokenizer.eod if append_eod else None
        self.split = split

    def encode(self, chunk: Chunk) -> Encoded:
        """The ids of the documents in `chunk`, and the records that held none."""
        found = documents_of(chunk, self.keys)
        encoded = [self._encoded([texts[k] for texts in found.texts]) for k in range(len(self.keys))]
        good = np.logical_and.reduce([e.good for e in encoded])
        bad = found.bad + [(NO_IDS, found.numbers[i]) for i in np.flatnonzero(~good)]
        kept = [e.finished(good, self.eod) for e in encoded]
        tokens, sizes, counts = ([arrays[i] for arrays in kept] for i in range(3))
        return Encoded(tokens, sizes, counts, chunk.source, sorted(bad, key=lambda b: b[1]), chunk.bytes)

    def _encoded(self, texts: list[str]) -> "_Documents":
        sequences = [self.split(text) for text in texts] if self.split else [[text] for text in texts]
        cut = [list(pieces(s, self.tokenizer.tokenize)) if len(s) > _BATCH else [s] for s in chain(*sequences)]
        tokens, sizes = self._ids(chain.from_iterable(cut))
        refused = sizes < 0
        in_sequence, in_document = _lengths(cut), _lengths(sequences)
        return _Documents(
            tokens,
            _sums(np.maximum(sizes, 0), in_sequence),
            in_document,
            _sums(_sums(refused, in_sequence), in_document) == 0,
        )

    def _ids(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one after another, and how many each has, -1 for one that the tokenizer refuses."""
        tokens, sizes = [np.empty(0, self.dtype)], [np.empty(0, np.int64)]
        for batch in _batches(texts):
            ids = self._batch_ids(batch)
            sizes.append(np.array([-1 if i is None else len(i) for i in ids], np.int64))
            total = int(np.maximum(sizes[-1], 0).sum())
            tokens.append(np.fromiter(chain.from_iterable(i or () for i in ids), self.dtype, total))
        return np.concatenate(tokens), np.concatenate(sizes)

    def _batch_ids(self, texts: list[str]) -> Sequence[Sequence[int] | None]:
        try:
            return self.tokenizer.tokenize_batch(texts)
        except ValueError:
            return [self._ids_or_none(text) for text in texts]

    def _ids_or_none(self, text: str) -> Sequence[int] | None:
        try:
            return self.tokenizer.tokenize(text)
        except ValueError:
            return None


class _Documents(NamedTuple):
    """The documents of a chunk under one key, the bad ones among them."""

    tokens: np.ndarray  # all ids
    sizes: np.ndarray  # int64 [sequences]
    counts: np.ndarray  # int64 [documents], sequences of each
    understood: np.ndarray  # bool [documents]

    @property
    def good(self) -> np.ndarray:
        """Which documents have ids: bool [documents]."""
        return self.understood & (_sums(self.sizes, self.counts) > 0)

    def finished(self, good: np.ndarray, eod: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, sizes and counts of the `good` documents without empty sequences, `eod` behind each document."""
        kept = np.repeat(good, self.counts) & (self.sizes > 0)
        tokens, sizes = self.tokens, self.sizes
        if not good.all():
            tokens = tokens[np.repeat(kept, sizes)]
        counts = _sums(kept, self.counts)[good]
        sizes = sizes[kept]
        if eod is not None:
            last = np.cumsum(counts) - 1  # the last sequence of each document
            tokens = np.insert(tokens, np.cumsum(sizes)[last], eod)
            sizes[last] += 1
        return tokens, sizes, counts


def _lengths(groups: Sequence[Sequence[object]]) -> np.ndarray:
    return np.fromiter(map(len, groups), np.int64, len(groups))


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sum of each group of `values`, int64 [groups]: the first `counts[0]` of them, the next `counts[1]`, ..."""
    before = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.cumsum(counts)
    return before[ends] - before[ends - counts]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, total = [], 0
    for text in texts:
        batch.append(text)
        total += len(text)
        if total >= _BATCH:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


MakeEncoder = Callable[[], Encoder]

# Set in each worker process before its first task: what it works with, or why it has nothing.
_worker_encoder: Encoder | Exception | None = None


def _start_worker(make_encoder: MakeEncoder) -> None:
    global _worker_encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: there are as many as were asked for
    try:
        _worker_encoder = make_encoder()
    except Exception as error:  # told by the first task; a pool would print a traceback here
        _worker_encoder = error


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, killed perhaps: nobody would ever tell it to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def worker_encoder() -> Encoder:
    """The encoder of this worker process."""
    assert _worker_encoder is not None
    if isinstance(_worker_encoder, Exception):
        raise _worker_encoder
    return _worker_encoder


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM that have a handler in Python come after the block; only the main thread runs handlers.

    Their handlers are replaced: blocking the signals would not do, for another thread could take them.
    """
    came: dict[int, None] = {}
    in_main_thread = threading.current_thread() is threading.main_thread()
    asked = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if in_main_thread}
    handlers = {number: handler for number, handler in asked.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: came.setdefault(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


class _WorkerProcess(SpawnProcess):
    """A process that does not import the script which runs: that takes longer than all that a worker needs.

    An interrupt from the keyboard reaches all processes; the parent alone acts on it and ends this one.
    """

    def start(self) -> None:
        """Start it, whole even where an interrupt comes meanwhile: else nobody would know of it to end it."""
        with _signals_wait():
            super().start()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # one without a file, which there is nothing to import of
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits, from its start
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            sys.modules["__main__"] = script


class _WorkerContext(SpawnContext):
    # spawn: a fork could copy a thread pool of the tokenizer in a state that never ends
    Process = _WorkerProcess


class WorkerPool(ProcessPoolExecutor):
    """A pool of processes with an encoder each from `make_encoder`, which is pickled: no part of the running script."""

    def __init__(self, make_encoder: MakeEncoder, workers: int) -> None:
        super().__init__(workers, _WorkerContext(), initializer=_start_worker, initargs=(make_encoder,))

    def end_now(self) -> None:
        """End the worker processes in the middle of what they do; returns when they are gone."""
        for process in multiprocessing.active_children():
            if isinstance(process, _WorkerProcess):
                process.kill()
        self.shutdown(cancel_futures=True)


def handed_over(encoder: Encoder) -> MakeEncoder:
    """What gives a copy of `encoder` in another process, sooner than making it from files again."""
    return functools.partial(_itself, encoder)


def _itself(encoder: Encoder) -> Encoder:
    return encoder


def _encode_in_worker(chunk: Chunk) -> Encoded:
    return worker_encoder().encode(chunk)


def read_all(sources: Sequence[Source], keys: Sequence[str]) -> Iterator[Chunk]:
    """The chunks of all sources."""
    for source in sources:
        yield from read_chunks(source, keys, _CHUNK_BYTES)


def encode_sources(
    sources: Sequence[Source], keys: Sequence[str], make_encoder: MakeEncoder, workers: int
) -> Generator[Encoded, None, None]:
    """The chunks of `sources`, encoded, in their order.

    With one worker this process does it; with more, that many processes do. Only a few chunks are in memory at a time.
    Raises `concurrent.futures.BrokenExecutor` where a process dies.
    """
    chunks = read_all(sources, keys)
    if workers == 1:
        yield from map(make_encoder().encode, chunks)
    else:
        yield from _encode_on_workers(chunks, make_encoder, workers)


def _encode_on_workers(chunks: Iterable[Chunk], make_encoder: MakeEncoder, workers: int) -> Iterator[Encoded]:
    pool = WorkerPool(make_encoder, workers)
    pending: deque[tuple[int, Future[Encoded]]] = deque()
    waiting = 0
    try:
        for chunk in chunks:
            size = chunk.text_bytes()
            while pending and (len(pending) >= workers * _CHUNKS_AHEAD or waiting + size > _BYTES_AHEAD):
                done, future = pending.popleft()
                waiting -= done
                yield future.result()
            pending.append((size, pool.submit(_encode_in_worker, chunk)))
            waiting += size
        while pending:
            yield pending.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)
