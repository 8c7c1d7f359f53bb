"""Lines of JSONL: texts, and every way in which a line can be bad."""

import json
from pathlib import Path

import pytest

from megatron.data.records import BadRecord, BadRecords, Source, texts_of


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"\n", "empty"),
        (b'{"text": ""}\n', "empty"),
        (b'{"text": "cut off', "cut off before its end"),
        (b'{"text": "cut off"\n', "cut off before its end"),
        (b'{"text": "cut off\\u12\r\n', "cut off before its end"),
        (b'{"text": "caf\xc3\n', "cut off before its end"),
        (b"{", "cut off before its end"),
        (b'{"text": "a"} {"text": "b"}\n', "not valid JSON"),
        (b'{"text": "\\u12 and more than that"}\n', "not valid JSON"),
        (b"text\n", "not valid JSON"),
        (b"[" * 100_000 + b"]", "not valid JSON"),
        (b'{"text": %s}' % (b"9" * 5000), "not a string"),
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


def test_a_number_of_any_length_beside_the_text_does_no_harm() -> None:
    assert texts_of(b'{"id": -%s, "text": "a"}' % (b"9" * 5000), ["text"]) == ["a"]


def test_the_report_counts_and_names_the_first_places(tmp_path: Path) -> None:
    source = Source(str(tmp_path / "x"), "jsonl")
    bad = BadRecords()
    assert bad.report() == []
    for line in range(10, 15):
        bad.add("empty", source, line)
    bad.add("not UTF-8", source, 12)
    assert bad.report() == [
        "skipped 6 bad records",
        f"  5 empty: {source.path}:10, {source.path}:11, {source.path}:12, ...",
        f"  1 not UTF-8: {source.path}:12",
    ]


def test_counts_of_parts_add_up_as_if_it_had_been_one() -> None:
    source, whole, parts = Source("x", "jsonl"), BadRecords(), [BadRecords() for _ in range(3)]
    for line, kind in enumerate(["a", "b", "a", "a", "b", "a", "c"]):
        whole.add(kind, source, line)
        parts[line // 3].add(kind, source, line)
    together = BadRecords()
    for part in parts:
        together.merge(part)
    assert together.report() == whole.report()


def test_the_first_bad_record_can_end_it() -> None:
    with pytest.raises(ValueError, match=r"x.jsonl:7: empty"):
        BadRecords(fail=True).add("empty", Source("x.jsonl", "jsonl"), 7)


@pytest.mark.parametrize("start", range(12))
def test_the_place_in_the_middle_of_a_file_counts_from_its_start(tmp_path: Path, start: int) -> None:
    (tmp_path / "x").write_bytes(b"ab\n\ncdef\ng\n")  # lines start at 0, 3, 4, 9
    source = Source(str(tmp_path / "x"), "jsonl", start)
    first = 1 + sum(begin < start for begin in (0, 3, 4, 9))
    if first <= 4:
        assert source.place(1) == f"{tmp_path / 'x'}:{first}"


def test_places_are_those_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    part = Source(str(tmp_path / "x"), "jsonl", start=4)
    for content, line in (("1\n2\n3\n4\n", 3), ("1 2\n3\n4\n", 2)):
        (tmp_path / "x").write_text(content)
        bad = BadRecords()
        bad.add("empty", part, 1)
        assert bad.first_places == {"empty": [f"{part.path}:{line}"]}
        assert part.place(1) == f"{part.path}:{line}"
