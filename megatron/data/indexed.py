"""Token files `PREFIX.bin` + `PREFIX.idx` (MMIDIDX version 1): the memory-mapped reader and the streaming writer."""

import contextlib
import functools
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.base.files import fsync_directory, temporary_name
from megatron.data.indexed_format import (
    DTYPES,
    HEADER_BYTES,
    MAGIC,
    OLD_MAGIC,
    VERSION,
    Header,
    best_dtype,
    data_path,
    dtype_code,
    index_path,
    unpack_header,
)

__all__ = ["IndexedDataset", "IndexedWriter", "best_dtype"]

_CHUNK = 1 << 20  # sequences looked at together
_SCAN_CHUNK = 1 << 23  # tokens looked at together
_MAX_SEQUENCE = np.iinfo(np.int32).max


class IndexedDataset:
    """The sequences of a token set, read through a memory map.

    Attributes:
        prefix: the name without extension.
        dtype: element type of the tokens.
        sizes: int32 [N], tokens in each sequence.
        document_indices: int64 [D], first sequence of each document, then N.

    Opening checks the index against itself and against the length of `.bin`; whatever is wrong is a ValueError that
    names the file, what was found and what is expected. With `verify=False` it looks at the ends of the files alone,
    in a time that does not grow with them; `verify()` then does the rest. Copies and worker processes map the files
    anew, without looking at them again.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        index_file, data_file = index_path(self.prefix), data_path(self.prefix)
        index, data = _map_file(index_file), _map_file(data_file)
        header = _checked_header(index, index_file)
        n = header.sequences
        self.sizes = np.frombuffer(index, "<i4", n, HEADER_BYTES)
        self._pointers = np.frombuffer(index, "<i8", n, HEADER_BYTES + 4 * n)
        self.document_indices = np.frombuffer(index, "<i8", header.documents, HEADER_BYTES + 12 * n)
        self.dtype = _element_type(header.code, self.sizes, len(data))
        _check_document_ends(self.document_indices, n, index_file)
        self._tokens = np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize)
        self._data_bytes = len(data)
        if verify or not self._last_sequence_ends_the_file():
            self.verify()

    def verify(self) -> None:
        """Check the whole index: documents in order, every sequence inside `.bin`. ValueError tells what is wrong."""
        _check_document_order(self.document_indices, index_path(self.prefix))
        _check_sequences(self.sizes, self._pointers, self.dtype, self._data_bytes, data_path(self.prefix))

    def _last_sequence_ends_the_file(self) -> bool:
        """Whether the last sequence ends where `.bin` does, as in every set whose sequences lie in order."""
        if len(self) == 0:
            return self._data_bytes == 0
        return int(self._pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize == self._data_bytes

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def tokens(self) -> int:
        """How many there are in all."""
        return len(self._tokens)

    @functools.cached_property
    def sizes_checksum(self) -> int:
        """CRC-32 of `sizes`: with their number it says which sample lies where."""
        return zlib.crc32(self.sizes.data)

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return functools.partial(type(self), verify=False), (self.prefix,)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of sequence `i` from `offset` on, `length` of them or all: a read-only view [length] of the file."""
        size = int(self.sizes[i])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"{self.prefix}: tokens {offset} to {stop} of sequence {i}, which has {size}")
        start, misplaced = divmod(int(self._pointers[i]), self.dtype.itemsize)
        if misplaced or start < 0 or start + size > len(self._tokens):
            raise ValueError(f"{self.prefix}.idx: sequence {i} does not lie inside {self.prefix}.bin: it is damaged")
        return self._tokens[start + offset : start + stop]

    def get_run(self, first: int, last: int) -> np.ndarray:
        """Tokens of sequences `first` to `last` - 1, one after another: a view where they lie so in the file."""
        pointers = self._pointers[first:last]
        sizes = self.sizes[first:last].astype(np.int64)
        if len(sizes) and (np.diff(pointers) == sizes[:-1] * self.dtype.itemsize).all():
            for end in (first, last - 1):
                self.get(end)  # complains where it is not inside the file
            start = int(pointers[0]) // self.dtype.itemsize
            return self._tokens[start : start + int(sizes.sum())]
        return np.concatenate([np.empty(0, self.dtype), *(self.get(i) for i in range(first, last))])

    def check_integers(self) -> None:
        """`ValueError` where the elements are no integers: then they are no token ids."""
        if self.dtype.kind == "f":
            raise ValueError(f"{self.prefix}.bin holds {self.dtype.name} numbers: token ids are integers")

    def max_token_id(self, part: int = 0, parts: int = 1) -> int:
        """The largest id in share `part` of `parts` equal shares of the tokens; -1 when the share is empty.

        Ranks scan a share each. A negative id is a ValueError: no vocabulary has it.
        """
        total, largest = len(self._tokens), -1
        begin, end = total * part // parts, total * (part + 1) // parts
        for start in range(begin, end, _SCAN_CHUNK):
            chunk = self._tokens[start : min(start + _SCAN_CHUNK, end)]
            if chunk.min() < 0:
                raise ValueError(f"{data_path(self.prefix)} holds the token id {chunk.min()}: ids start at 0")
            largest = max(largest, int(chunk.max()))
        return largest


def _map_file(path: Path) -> Any:
    """The whole file as a read-only buffer."""
    try:
        with open(path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        extension = Path(path.stem).suffix
        hint = f"; give the name without {extension}" if extension in (".bin", ".idx") else ""
        raise ValueError(f"{path} is missing: a token set is a pair PREFIX.bin and PREFIX.idx{hint}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _checked_header(index: Any, path: Path) -> Header:
    if index[: len(OLD_MAGIC)] == OLD_MAGIC:
        raise ValueError(
            f"{path} is in the old TNTIDX layout (--data-impl lazy or cached), which is not read here: "
            "run tools/preprocess_data.py on the text again"
        )
    if index[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} starts with {bytes(index[: len(MAGIC)])!r}, expected {MAGIC!r}: not a token index")
    if len(index) < HEADER_BYTES:
        raise ValueError(f"{path} has {len(index)} bytes, its header alone takes {HEADER_BYTES}: the file is truncated")
    header = unpack_header(index)
    if header.version != VERSION:
        raise ValueError(f"{path} has version {header.version}, expected {VERSION}")
    if header.code not in DTYPES:
        raise ValueError(f"{path} has element type code {header.code}, expected {min(DTYPES)} to {max(DTYPES)}")
    # Newer writers may append one byte a sequence, its mode.
    if len(index) not in (header.file_bytes, header.file_bytes + header.sequences):
        raise ValueError(
            f"{path} has {len(index)} bytes, expected {header.file_bytes} for {header.sequences} sequences and "
            f"{header.documents} entries of the document index: the file is truncated or damaged"
        )
    return header


def _element_type(code: int, sizes: np.ndarray, file_bytes: int) -> np.dtype:
    candidates = [np.dtype(name) for name in DTYPES[code]]
    if len(candidates) == 1:
        return candidates[0]
    tokens = int(sizes.sum(dtype=np.int64))
    return next((dtype for dtype in candidates if tokens * dtype.itemsize == file_bytes), candidates[0])


def _check_document_ends(documents: np.ndarray, sequences: int, path: Path) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        found = f"{documents[0]} to {documents[-1]}" if len(documents) else "nothing"
        raise ValueError(f"{path}: the document index holds {found}, expected 0 to {sequences}")


def _check_document_order(documents: np.ndarray, path: Path) -> None:
    if (documents[1:] < documents[:-1]).any():
        raise ValueError(f"{path}: the document index goes backwards, expected rising sequence numbers")


def _check_sequences(sizes: np.ndarray, pointers: np.ndarray, dtype: np.dtype, data_bytes: int, path: Path) -> None:
    """Every sequence lies inside `.bin` on an element boundary, and the last one ends where the file ends."""
    described = 0
    for start in range(0, len(sizes), _CHUNK):
        size = sizes[start : start + _CHUNK].astype(np.int64)
        pointer = pointers[start : start + _CHUNK]
        if size.min() < 0 or pointer.min() < 0 or (pointer % dtype.itemsize).any():
            raise ValueError(
                f"{path.with_suffix('.idx')}: sequences {start} to {start + len(size) - 1} have a negative size or an "
                f"offset that is not a multiple of {dtype.itemsize} bytes: the file is damaged"
            )
        # the pointers by themselves too: a damaged one may be so large that the sum runs over
        described = max(described, int(pointer.max()), int((pointer + size * dtype.itemsize).max()))
    if described != data_bytes:
        raise ValueError(
            f"{path} has {data_bytes} bytes, its index describes {described} (elements {dtype.name}): the file is "
            "truncated or belongs to another index"
        )


class IndexedWriter:
    """Writes a token set document by document; the two files appear together, complete, when the block ends.

        with IndexedWriter("corpus_text_document", best_dtype(50_257)) as writer:
            writer.add_document([15496, 995, 50256])

    Content goes to temporary names in the same folder; an exception inside the block removes them and leaves what stood
    at the names before. Memory does not grow with what is written. ValueError for ids that `dtype` cannot hold.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.sequences = self.documents = self.tokens = 0
        self._is_complete = False
        self._code = dtype_code(self.dtype)
        self._temporary = temporary_name(data_path(self.prefix))
        self._temporary_index = temporary_name(index_path(self.prefix))

    def __enter__(self) -> Self:
        folder = self._temporary.parent
        # What the index will hold is spooled to nameless files, so that memory does not grow with the corpus.
        self._sizes: IO[bytes] = tempfile.TemporaryFile(dir=folder)
        self._ends: IO[bytes] = tempfile.TemporaryFile(dir=folder)
        self._data: IO[bytes] = open(self._temporary, "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.complete()
                self._publish()
        finally:
            for stream in (self._data, self._sizes, self._ends):
                with contextlib.suppress(OSError):  # of what a full disk did not take, which was told before
                    stream.close()
            self._temporary.unlink(missing_ok=True)
            self._temporary_index.unlink(missing_ok=True)

    def complete(self) -> None:
        """Bring both files to disk under their temporary names; nothing is added then, the end of the block renames.

        For several sets that are to appear together or not at all; without it the end of the block does it.
        """
        if not self._is_complete:
            with _naming(data_path(self.prefix)):
                self._finish()
            self._is_complete = True

    def add_document(self, ids: ArrayLike) -> None:
        """Append a document that is one sequence of ids [n]."""
        tokens = np.asarray(ids).reshape(-1)
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: ArrayLike, sizes: ArrayLike, counts: ArrayLike | None = None) -> None:
        """Append documents: `tokens` [sum of sizes] one after another, `sizes` [sequences], `counts` [documents].

        `counts` are the sequences of each document, one each where it is None.
        """
        lengths = np.asarray(sizes, np.int64)
        per_document = np.ones(len(lengths), np.int64) if counts is None else np.asarray(counts, np.int64)
        assert per_document.sum() == len(lengths), "the counts do not add up to the sequences"
        self._append(np.asarray(tokens), lengths, self.sequences + np.cumsum(per_document))

    def add_sequences(self, sequences: Iterable[ArrayLike]) -> None:
        """Append one document that is made of several sequences (sentences), each [n]."""
        pieces = [np.asarray(piece).reshape(-1) for piece in sequences]
        # an empty list is float64 to NumPy and would make the others float
        tokens = np.concatenate([p for p in pieces if len(p)] or [np.empty(0, self.dtype)])
        self._append(tokens, np.array([len(p) for p in pieces], np.int64), np.array([self.sequences + len(pieces)]))

    def _append(self, tokens: np.ndarray, sizes: np.ndarray, document_ends: np.ndarray) -> None:
        assert len(tokens) == sizes.sum(), "the sizes do not add up to the tokens"
        self._check_ids(tokens)
        if len(sizes) and sizes.max() > _MAX_SEQUENCE:
            raise ValueError(f"{self.prefix}: a sequence of {sizes.max()} tokens; the format holds {_MAX_SEQUENCE}")
        assert not self._is_complete, "the set is complete"
        with _naming(data_path(self.prefix)):
            self._data.write(tokens.astype(self.dtype, copy=False).tobytes())
            self._sizes.write(sizes.astype("<i4").tobytes())
            self._ends.write(document_ends.astype("<i8").tobytes())
        self.tokens += len(tokens)
        self.sequences += len(sizes)
        self.documents += len(document_ends)

    def _check_ids(self, tokens: np.ndarray) -> None:
        if len(tokens) == 0 or self.dtype.kind == "f" or tokens.dtype == self.dtype:
            return
        low, high, limits = tokens.min(), tokens.max(), np.iinfo(self.dtype)
        if low < limits.min or high > limits.max or tokens.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix}: ids {low} to {high} ({tokens.dtype}) do not fit {self.dtype.name}")

    def _finish(self) -> None:
        _flush_to_disk(self._data)
        written, expected = self._temporary.stat().st_size, self.tokens * self.dtype.itemsize
        if written != expected:
            raise OSError(f"{data_path(self.prefix)}: {written} bytes arrived on disk, expected {expected}")
        with open(self._temporary_index, "wb") as index:
            index.write(Header(MAGIC, VERSION, self._code, self.sequences, self.documents + 1).pack())
            _copy_from_start(self._sizes, index)
            for pointers in self._pointer_chunks():
                index.write(pointers.tobytes())
            index.write(np.zeros(1, "<i8").tobytes())
            _copy_from_start(self._ends, index)
            _flush_to_disk(index)

    def _pointer_chunks(self) -> Iterator[np.ndarray]:
        """Byte offset of each sequence, int64, a chunk at a time."""
        self._sizes.seek(0)
        offset = 0
        while chunk := self._sizes.read(4 * _CHUNK):
            ends = offset + np.cumsum(np.frombuffer(chunk, "<i4"), dtype="<i8") * self.dtype.itemsize
            yield np.concatenate([np.array([offset], "<i8"), ends[:-1]])
            offset = int(ends[-1])

    def _publish(self) -> None:
        # An index never stands beside tokens that are not its own: the old one goes first, the new one comes last.
        index_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._temporary, data_path(self.prefix))
        os.replace(self._temporary_index, index_path(self.prefix))
        fsync_directory(self._temporary.parent)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an `OSError` of the block name `path`: one of writing, such as a full disk, names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _copy_from_start(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target)


def _flush_to_disk(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
