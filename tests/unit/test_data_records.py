"""Lines of JSONL: texts, and every way in which a line can be bad."""

import io
import itertools
import json

import pytest

from megatron.data.records import BadRecord, BadRecords, read_chunks, texts_of


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"\n", "empty"),
        (b'{"text": ""}\n', "empty"),
        (b'{"text": "cut off', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"text": %s}' % (b"9" * 5000), "not valid JSON"),
        (b'["text"]\n', "not a JSON object"),
        (b'{"title": "a"}\n', "key missing"),
        (b'{"text": 7}\n', "not a string"),
        (b'{"text": null}\n', "not a string"),
        (b'{"text": "\xff"}\n', "not UTF-8"),
        (b'{"text": "\\ud800"}\n', "lone surrogate, which is no character"),
    ],
)
def test_bad_lines_by_kind(line: bytes, kind: str) -> None:
    with pytest.raises(BadRecord) as caught:
        texts_of(line, ["text"])
    assert str(caught.value) == kind


@pytest.mark.parametrize("text", ["a", " ", "\u2028 \x00 \r\n \ufeff", "\U0001f600", "<|endoftext|>"])
def test_unusual_text_goes_through(text: str) -> None:
    for ascii_only in (True, False):
        line = json.dumps({"title": "t", "text": text}, ensure_ascii=ascii_only).encode() + b"\r\n"
        assert texts_of(line, ["text", "title"]) == [text, "t"]


def test_chunks_are_whole_lines_and_leave_nothing_out() -> None:
    lines = [b"%d" % i * (i % 5) + b"\xe2\x80\xa8\r\n" for i in range(50)] + [b"last, without line feed"]
    chunks = list(read_chunks(io.BytesIO(b"\xef\xbb\xbf" + b"".join(lines)), 40))
    assert [line for chunk in chunks for line in chunk.lines] == lines
    before = itertools.accumulate((len(chunk.lines) for chunk in chunks), initial=0)
    assert [chunk.first_line for chunk in chunks] == [1 + count for count in before][:-1]
    assert sum(chunk.bytes for chunk in chunks) == 3 + sum(map(len, lines))
    assert len(chunks) > 5


def test_the_report_counts_and_names_the_first_lines() -> None:
    bad = BadRecords()
    assert bad.report() == []
    for line in range(10, 15):
        bad.add("empty", line)
    bad.add("not UTF-8", 12)
    assert bad.report() == [
        "skipped 6 bad lines",
        "  5 empty: line 10, 11, 12, ...",
        "  1 not UTF-8: line 12",
    ]
