"""From a JSONL file to token ids, on as many processes as wanted, in the order of the file."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from megatron.data.records import NO_IDS, BadRecord, Chunk, read_chunks, texts_of

_CHUNK_BYTES = 1 << 18
_CHUNKS_AHEAD = 4  # chunks a worker that wait or are done before their turn


class BatchTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def eod(self) -> int: ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


class Encoded(NamedTuple):
    """The documents of one chunk.

    `tokens[k]` are the ids of all documents under key k, one document after another; `sizes[k]` int64 [documents].
    """

    tokens: list[np.ndarray]
    sizes: list[np.ndarray]
    bad: list[tuple[str, int]]  # kind and line number of each line that was skipped
    bytes: int  # of the file that the chunk took

    @property
    def documents(self) -> int:
        """Documents under each key."""
        return len(self.sizes[0])


class Encoder:
    """Turns chunks of JSONL into ids: one document a line under each of `keys`, `append_eod` a last id for each.

    A line that lacks a text under any key is skipped for all of them, so that the sets of two keys stay in step.
    """

    def __init__(self, tokenizer: BatchTokenizer, keys: Sequence[str], append_eod: bool, dtype: np.dtype) -> None:
        self.tokenizer = tokenizer
        self.keys = keys
        self.dtype = dtype
        self.end = [tokenizer.eod] if append_eod else []

    def encode(self, chunk: Chunk) -> Encoded:
        """The ids of the documents in `chunk`, and the lines that held none."""
        records: list[list[str]] = []
        numbers: list[int] = []
        bad: list[tuple[str, int]] = []
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            try:
                records.append(texts_of(line, self.keys))
                numbers.append(number)
            except BadRecord as error:
                bad.append((str(error), number))
        documents = [self._ids([texts[k] for texts in records]) for k in range(len(self.keys))]
        good = [i for i in range(len(records)) if all(ids[i] for ids in documents)]
        bad += [(NO_IDS, numbers[i]) for i in sorted(set(range(len(records))) - set(good))]
        packed = [self._packed([ids[i] for i in good]) for ids in documents]
        return Encoded([tokens for tokens, _ in packed], [sizes for _, sizes in packed], sorted(bad), chunk.bytes)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, none for one that the tokenizer refuses."""
        try:
            return self.tokenizer.tokenize_batch(texts)
        except ValueError:
            return [self._ids_or_none(text) for text in texts]

    def _ids_or_none(self, text: str) -> list[int]:
        try:
            return self.tokenizer.tokenize_batch([text])[0]
        except ValueError:
            return []

    def _packed(self, documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        sizes = np.array([len(ids) + len(self.end) for ids in documents], np.int64)
        stream = itertools.chain.from_iterable(itertools.chain(ids, self.end) for ids in documents)
        return np.fromiter(stream, self.dtype, int(sizes.sum())), sizes


# Set in each worker process before its first chunk.
_worker_encoder: Encoder | None = None


def _start_worker(make_encoder: Callable[[], Encoder]) -> None:
    global _worker_encoder
    # An interrupt from the keyboard reaches all processes; the parent alone acts on it and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: there are as many as were asked for
    _worker_encoder = make_encoder()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, killed perhaps: nobody would ever tell it to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder.encode(chunk)


def encode_file(path: str, make_encoder: Callable[[], Encoder], workers: int) -> Generator[Encoded, None, None]:
    """The chunks of the JSONL file `path`, encoded, in the order of the file.

    With one worker this process does it; with more, that many processes do, each with an encoder of its own from
    `make_encoder` (which is pickled). Only a few chunks are in memory at a time. Raises
    `concurrent.futures.BrokenExecutor` where a process dies.
    """
    with open(path, "rb") as stream:
        chunks = read_chunks(stream, _CHUNK_BYTES)
        if workers == 1:
            yield from map(make_encoder().encode, chunks)
        else:
            yield from _encode_on_workers(chunks, make_encoder, workers)


def _encode_on_workers(chunks: Iterable[Chunk], make_encoder: Callable[[], Encoder], workers: int) -> Iterator[Encoded]:
    # spawn: a fork could copy a thread pool of the tokenizer in a state that never ends
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(make_encoder,))
    pending: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) >= workers * _CHUNKS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
