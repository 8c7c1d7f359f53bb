"""Files of text as users have them: marks, line ends, and lines that are no objects."""

import re
from pathlib import Path

import pytest

from megatron.tasks.sample_files import read_prompts
from megatron.tasks.text_files import parse_json, read_objects, read_utf8


def test_a_mark_of_bytes_is_no_text_and_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffé \r\n\r\nb\u2028c".encode())
    assert read_utf8("--flag", str(path)) == "é \r\n\r\nb\u2028c"
    assert read_prompts(str(path)) == [{"prompt": "é "}, {"prompt": "b\u2028c"}]


def test_objects_come_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'\n{"text": "a", "id": NaN}\r\n \n{"text": ""}')
    found = read_objects("--flag", str(path), "text")
    assert [(number, value["text"]) for number, value in found] == [(2, "a"), (4, "")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"', " (Expecting ',' delimiter at character 13)"),
        ("[" * 100_000, " (it is nested too deeply)"),
        ('{"text": "a", "id": "\\ud83d"}', " (half of a letter is in it, a surrogate "),
        ('["text"]', ""),
        ('{"prompt": "a"}', ""),
        ('{"text": null}', ""),
    ],
)
def test_what_is_no_such_object_is_told_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    wanted = re.escape(f'--flag {path}, line 2: it must be a JSON object with a text as "text"{reason}')
    with pytest.raises(ValueError, match=f"^{wanted}.*$"):
        read_objects("--flag", str(path), "text")


def test_both_halves_of_a_letter_are_one() -> None:
    assert parse_json('"\\ud83d\\ude00 \\\\ud83d"') == "\U0001f600 \\ud83d"
