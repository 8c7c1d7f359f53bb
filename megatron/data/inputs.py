"""Files of text as people have them: names and globs, compression, and the records inside, in chunks."""

import glob
import os
from collections.abc import Iterator, Sequence
from typing import IO

from megatron.data import parquet
from megatron.data.compression import ending_of, open_unpacked
from megatron.data.records import Chunk, Source

TEXT_DOCUMENTS = ("line", "blank-line", "file")
FORMATS = ("auto", "jsonl", "text", "parquet")
_TEXT_ENDINGS = (".txt", ".text")
_UTF8_BOM = b"\xef\xbb\xbf"


def find_files(patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that names and glob patterns stand for, and a sentence for each thing that is wrong.

    Patterns are taken in their order; what one matches is sorted by name. `**` goes through folders.
    """
    files: dict[str, str] = {}  # in order: what a name leads to, and the name
    problems = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            what = "no file matches" if glob.has_magic(pattern) else "there is no such file"
            problems.append(f"--input {pattern}: {what}")
        for path in found:
            place = os.path.realpath(path)
            if place in files:
                before = "" if files[place] == path else f", before as {files[place]}"
                problems.append(f"--input {pattern}: {path} is named twice{before}")
            else:
                files[place] = path
    return list(files.values()), problems


def layout_of(path: str, asked: str, text_documents: str) -> str:
    """The `layout` of a `Source` for a file, by its name where `asked` is "auto", else by that format.

    `.txt` and `.text` are plain text, `.parquet` is Parquet, everything else JSONL; an ending that tells the
    compression is looked through.
    """
    plain = os.path.splitext(path.removesuffix(ending_of(path)))[1]
    if asked == "auto":
        asked = "text" if plain in _TEXT_ENDINGS else "parquet" if plain == ".parquet" else "jsonl"
    return text_documents if asked == "text" else asked


def find_sources(
    patterns: Sequence[str], asked: str, text_documents: str, keys: Sequence[str]
) -> tuple[list[Source], list[str]]:
    """The whole files that `patterns` stand for, in a fixed order, and a sentence for each thing that is wrong."""
    files, problems = find_files(patterns)
    sources = [Source(path, layout_of(path, asked, text_documents)) for path in files]
    plain = [source.path for source in sources if source.layout in TEXT_DOCUMENTS]
    if plain and len(keys) > 1:
        problems.append(f"--json-keys {' '.join(keys)}: {plain[0]} is plain text, which has one text a document")
    for source in sources:
        if source.layout == "parquet":
            problems += parquet.problems(source.path, keys)
    return sources, problems


def cut(sources: Sequence[Source], parts: int) -> list[list[Source]]:
    """`parts` lists that together are `sources` in their order, of about equal sizes.

    Files of lines are cut between lines; others, compressed ones too, go into one part whole. A list may be empty.
    """
    sizes = [os.path.getsize(source.path) for source in sources]
    total, begin = sum(sizes), 0
    bounds = [total * k // parts for k in range(parts)] + [total]
    cut_up: list[list[Source]] = [[] for _ in range(parts)]
    for source, size in zip(sources, sizes, strict=True):
        shares = [(max(low - begin, 0), min(high - begin, size)) for low, high in zip(bounds, bounds[1:], strict=False)]
        held = [(k, low, high) for k, (low, high) in enumerate(shares) if low < high]
        if source.layout in ("jsonl", "line") and not ending_of(source.path):
            for k, low, high in held:
                cut_up[k].append(Source(source.path, source.layout, low, None if high == size else high))
        else:
            cut_up[held[0][0] if held else 0].append(source)
        begin += size
    return cut_up


def read_chunks(source: Source, keys: Sequence[str], chunk_bytes: int) -> Iterator[Chunk]:
    """The records of `source` in chunks of about `chunk_bytes`, one chunk in memory at a time.

    Lines end at line feeds only; a byte order mark at the start of a file is dropped. ValueError, naming the file,
    where its compression is damaged or it is cut short.
    """
    if source.layout == "parquet":
        yield from parquet.read_chunks(source, keys, chunk_bytes)
        return
    with open_unpacked(source.path) as (stream, stored):
        yield from _chunks(source, stored, stream, chunk_bytes)


def _chunks(source: Source, stored: IO[bytes], stream: IO[bytes], chunk_bytes: int) -> Iterator[Chunk]:
    numbers: list[int] = []
    records: list[bytes] = []
    total = 0
    told = source.start
    size = os.fstat(stored.fileno()).st_size if source.stop is None else source.stop
    for number, record in _records(source, stream):
        numbers.append(number)
        records.append(record)
        total += len(record)
        if total >= chunk_bytes:
            position = min(stored.tell(), size)
            yield Chunk(source, numbers, records, position - told)
            numbers, records, total, told = [], [], 0, position
    if records:
        yield Chunk(source, numbers, records, size - told)


def _records(source: Source, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    if source.layout == "file":
        return iter([(1, stream.read().removeprefix(_UTF8_BOM))])
    lines = enumerate(_lines(source, stream), start=1)
    return _between_blank_lines(lines) if source.layout == "blank-line" else lines


def _lines(source: Source, stream: IO[bytes]) -> Iterator[bytes]:
    position = 0
    if source.start:
        stream.seek(source.start - 1)
        position = source.start - 1 + len(stream.readline())
    for line in stream:
        if source.stop is not None and position >= source.stop:
            return
        yield line if position else line.removeprefix(_UTF8_BOM)
        position += len(line)


def _between_blank_lines(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    first, document = 0, list[bytes]()
    for number, line in lines:
        if line.strip():
            first = first if document else number
            document.append(line)
        elif document:
            yield first, b"".join(document)
            document = []
    if document:
        yield first, b"".join(document)
