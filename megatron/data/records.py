"""Records of a corpus: where they come from, the texts that they hold, and a count of those that hold none."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# Why a record is skipped.
NOT_UTF8 = "not UTF-8"
NOT_JSON = "not valid JSON"
CUT = "cut off before its end"
NOT_OBJECT = "not a JSON object"
NO_KEY = "key missing"
NOT_STRING = "not a string"
SURROGATE = "lone surrogate, which is no character"
EMPTY = "empty"
NO_IDS = "not understood by the tokenizer"

_SHOWN = 3  # places kept of each kind
_COUNTED_TOGETHER = 1 << 24  # bytes
# Nobody looks at numbers: as floats they may have more digits than Python takes for an integer.
_JSON = json.JSONDecoder(parse_int=float)
_LONGEST_ESCAPE = 6  # backslash, u and four digits


class Source(NamedTuple):
    """A file, or the lines of it that start at byte `start` or later and before byte `stop`.

    `layout` tells what a record is: "jsonl" (an object a line), "line", "blank-line" and "file" (plain text: a line,
    what stands between blank lines, all of it) or "parquet" (a row).
    """

    path: str
    layout: str
    start: int = 0
    stop: int | None = None

    def place(self, number: int, before: int | None = None) -> str:
        """`FILE:LINE` of record `number` of this source, from 1; for Parquet the row. `before` is `lines_before()`."""
        return f"{self.path}:{number + (self.lines_before() if before is None else before)}"

    def lines_before(self) -> int:
        """How many lines of the file come before this source; reads the file up to there."""
        return _lines_before(self.path, self.start)


def _lines_before(path: str, offset: int) -> int:
    """How many lines of a file start before byte `offset`."""
    if offset == 0:
        return 0
    count, left = 1, offset - 1  # the first line, and one behind each line feed
    with open(path, "rb") as stream:
        while left and (block := stream.read(min(left, _COUNTED_TOGETHER))):
            count += block.count(b"\n")
            left -= len(block)
    return count


class Chunk(NamedTuple):
    """Consecutive records of one source.

    A record is the bytes of a line or a document or, from Parquet, the bytes under each key, None where there is no
    text.
    """

    source: Source
    numbers: Sequence[int]  # line (or row) at which each record starts, from 1 within the source
    records: Sequence[bytes | tuple[bytes | None, ...]]
    bytes: int  # of the file as it is stored, that were read for it

    def text_bytes(self) -> int:
        """What the records take in memory."""
        return sum(len(cell or b"") for r in self.records for cell in (r if isinstance(r, tuple) else (r,)))


class BadRecord(Exception):
    """A record without the texts asked for; its only argument is the kind, one of the constants above."""


class BadRecords:
    """Skipped records counted by kind, with the places of the first few of each.

    With `fail` the first one that is added is a ValueError that names its place.
    """

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail
        self.counts: Counter[str] = Counter()
        self.first_places: dict[str, list[str]] = {}
        self._lines_before: tuple[Source | None, int] = (None, 0)  # of the last source, as counting them takes time

    def add(self, kind: str, source: Source, number: int) -> None:
        """Count record `number` of `source`."""
        if self.fail:
            raise ValueError(f"{self._place(source, number)}: {kind}; --on-bad-record skip goes on without it")
        self.counts[kind] += 1
        places = self.first_places.setdefault(kind, [])
        if len(places) < _SHOWN:
            places.append(self._place(source, number))

    def _place(self, source: Source, number: int) -> str:
        if source != self._lines_before[0]:
            self._lines_before = (source, source.lines_before())
        return source.place(number, self._lines_before[1])

    def merge(self, later: "BadRecords") -> None:
        """Add what was counted in a later part of the input."""
        self.counts += later.counts
        for kind, places in later.first_places.items():
            known = self.first_places.setdefault(kind, [])
            known += places[: _SHOWN - len(known)]

    def report(self) -> list[str]:
        """A sentence for all and one for each kind, most frequent first; nothing where nothing was skipped."""
        if not self.counts:
            return []
        lines = [f"skipped {self.counts.total()} bad records"]
        for kind, count in self.counts.most_common():
            more = ", ..." if count > _SHOWN else ""
            lines.append(f"  {count} {kind}: {', '.join(self.first_places[kind])}{more}")
        return lines


class Documents(NamedTuple):
    """The texts of a chunk, and its records that hold none."""

    texts: list[list[str]]  # one for each key
    numbers: list[int]
    bad: list[tuple[str, int]]  # kind and number


def documents_of(chunk: Chunk, keys: Sequence[str]) -> Documents:
    """The texts in `chunk` under each of `keys`; a record that lacks one of them is bad."""
    documents = Documents([], [], [])
    for number, record in zip(chunk.numbers, chunk.records, strict=True):
        try:
            documents.texts.append(_texts(record, chunk.source.layout, keys))
            documents.numbers.append(number)
        except BadRecord as error:
            documents.bad.append((str(error), number))
    return documents


def _texts(record: bytes | tuple[bytes | None, ...], layout: str, keys: Sequence[str]) -> list[str]:
    if isinstance(record, tuple):
        return [_cell_text(cell) for cell in record]
    return texts_of(record, keys) if layout == "jsonl" else [plain_text(record)]


def texts_of(line: bytes, keys: Sequence[str]) -> list[str]:
    """The text under each of `keys` in the JSON object on `line`; raises `BadRecord` where one cannot be had."""
    record = _parsed(line)
    texts = []
    for key in keys:
        if key not in record:
            raise BadRecord(NO_KEY)
        text = record[key]
        if not isinstance(text, str):
            raise BadRecord(NOT_STRING)
        if not text:
            raise BadRecord(EMPTY)
        if not text.isascii() and _has_surrogate(text):
            raise BadRecord(SURROGATE)
        texts.append(text)
    return texts


def plain_text(document: bytes) -> str:
    """The text of a document of plain text, without the line break at its end; raises `BadRecord`."""
    text = _decoded(document.removesuffix(b"\n").removesuffix(b"\r"))
    if not text.strip():
        raise BadRecord(EMPTY)
    return text


def _cell_text(cell: bytes | None) -> str:
    if cell is None:
        raise BadRecord(NOT_STRING)
    if not cell:
        raise BadRecord(EMPTY)
    return _decoded(cell)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        cut = error.reason == "unexpected end of data"
        raise BadRecord(CUT if cut else NOT_UTF8) from None


def _parsed(line: bytes) -> dict[str, object]:
    text = _decoded(line.rstrip(b"\r\n"))
    if not text.strip():
        raise BadRecord(EMPTY)
    try:
        record = _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise BadRecord(CUT if _stopped_at_the_end(error) else NOT_JSON) from None
    except (ValueError, RecursionError):
        raise BadRecord(NOT_JSON) from None
    if not isinstance(record, dict):
        raise BadRecord(NOT_OBJECT)
    return record


def _stopped_at_the_end(error: json.JSONDecodeError) -> bool:
    """Whether what is there could have become JSON, had the line gone on."""
    if error.msg.startswith("Unterminated string"):
        return True
    end = len(error.doc.rstrip())
    return error.pos >= end or (error.msg.startswith("Invalid \\uXXXX") and error.pos > end - _LONGEST_ESCAPE)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
