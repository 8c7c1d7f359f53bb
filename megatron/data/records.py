"""Lines of a JSONL file: the texts that they hold, and a count of those that hold none."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

# Why a line is skipped.
NOT_UTF8 = "not UTF-8"
NOT_JSON = "not valid JSON"
NOT_OBJECT = "not a JSON object"
NO_KEY = "key missing"
NOT_STRING = "not a string"
SURROGATE = "lone surrogate, which is no character"
EMPTY = "empty"
NO_IDS = "not understood by the tokenizer"

_SHOWN = 3  # line numbers kept of each kind
_UTF8_BOM = b"\xef\xbb\xbf"


class BadRecord(Exception):
    """A line without the texts asked for; its only argument is the kind, one of the constants above."""


class BadRecords:
    """Skipped lines counted by kind, with the numbers of the first few of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_lines: dict[str, list[int]] = {}

    def add(self, kind: str, line: int) -> None:
        """Count line number `line`, from 1."""
        self.counts[kind] += 1
        lines = self.first_lines.setdefault(kind, [])
        if len(lines) < _SHOWN:
            lines.append(line)

    def report(self) -> list[str]:
        """A sentence for all and one for each kind, most frequent first; nothing where no line was skipped."""
        if not self.counts:
            return []
        lines = [f"skipped {self.counts.total()} bad lines"]
        for kind, count in self.counts.most_common():
            shown = ", ".join(map(str, self.first_lines[kind]))
            more = ", ..." if count > _SHOWN else ""
            lines.append(f"  {count} {kind}: line {shown}{more}")
        return lines


class Chunk(NamedTuple):
    """Consecutive lines of a file."""

    first_line: int  # from 1
    lines: list[bytes]
    bytes: int


def read_chunks(stream: IO[bytes], chunk_bytes: int) -> Iterator[Chunk]:
    """The lines of a binary stream, cut at line feeds only, in chunks of about `chunk_bytes`.

    A byte order mark before the first line is dropped.
    """
    first, lines, total = 1, [], 0
    for number, line in enumerate(stream, start=1):
        total += len(line)
        lines.append(line.removeprefix(_UTF8_BOM) if number == 1 else line)
        if total >= chunk_bytes:
            yield Chunk(first, lines, total)
            first, lines, total = number + 1, [], 0
    if lines:
        yield Chunk(first, lines, total)


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


def _parsed(line: bytes) -> dict[str, object]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRecord(NOT_UTF8) from None
    if not text.strip():
        raise BadRecord(EMPTY)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRecord(NOT_JSON) from None
    if not isinstance(record, dict):
        raise BadRecord(NOT_OBJECT)
    return record


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
