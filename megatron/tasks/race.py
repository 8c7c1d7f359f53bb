"""RACE: questions about an article with four options each, from folders of files (Lai et al., arXiv:1704.04683)."""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.base.complaints import raise_joined
from megatron.model import BertForMultipleChoice
from megatron.tasks.examples import Example, as_ids
from megatron.tasks.task import Files, Task
from megatron.tokenizer import Tokenizer

LETTERS = ("A", "B", "C", "D")
GROUPS = ("middle", "high")

_FIELDS = {"article": str, "questions": list, "options": list, "answers": list}


@dataclasses.dataclass(frozen=True)
class Article:
    """What a file holds: a text, and for each question its four options and the number of the right one."""

    name: str
    group: str
    text: str
    questions: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]
    answers: tuple[int, ...]


def read_articles(files: Files) -> list[Article]:
    """The articles of folders, in the order of these and of the files' names.

    A folder has folders `middle` and `high` that hold the files (`RACE/dev`), and nothing beside them is read, or else
    it holds them itself (`RACE/dev/middle`). What does not end in `.txt`, or begins with a dot, is left alone. An
    article is named by its folder and file, `middle/1`.
    Raises `ConfigError` with a sentence for each folder without questions and each file that is not as it should be.
    """
    found: list[Article] = []
    problems: list[str] = []
    for path in files.paths:
        before = len(found), len(problems)
        for file in _files(Path(path)):
            try:
                found.append(read_article(file))
            except ValueError as error:
                problems.append(str(error))
        if len(problems) == before[1] and not any(article.questions for article in found[before[0] :]):
            problems.append(
                f"{files.flag} {path}: there are no questions in it; it must be a folder of .txt files, or have "
                "folders middle and high of them"
            )
    raise_joined(problems)
    return found


def _files(folder: Path) -> list[Path]:
    """The files of articles in those folders of `folder` that RACE has, else right in it."""
    return [file for group in GROUPS for file in _own_files(folder / group)] or _own_files(folder)


def _own_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.txt") if not file.name.startswith(".") and file.is_file())


def read_article(file: Path) -> Article:
    """The article of one file, a JSON object. Raises ValueError with a sentence that names the file and the place."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}, line {error.lineno}, column {error.colno}: it is not JSON ({error.msg}); a file holds one object"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file}: it cannot be read: {error}") from None
    problem = _problem(fields)
    if problem:
        raise ValueError(f"{file}: {problem}")
    group = os.path.basename(os.path.dirname(os.path.abspath(file)))  # also of a folder that is given as "." or ".."
    return Article(
        f"{group}/{file.stem}",
        group,
        fields["article"],
        tuple(fields["questions"]),
        tuple(map(tuple, fields["options"])),
        tuple(map(LETTERS.index, fields["answers"])),
    )


def _problem(fields: Any) -> str:
    """What is wrong with a file's object; empty where nothing is."""
    if not isinstance(fields, dict):
        return f"it must hold a JSON object, and holds a {type(fields).__name__}"
    for name, kind in _FIELDS.items():
        if name not in fields:
            return f"the field {name!r} is missing; there must be {', '.join(_FIELDS)}"
        if not isinstance(fields[name], kind):
            return f"{name!r} must be a {'text' if kind is str else 'list'}, and is a {type(fields[name]).__name__}"
    counts = {name: len(fields[name]) for name in ("questions", "options", "answers")}
    if len(set(counts.values())) > 1:
        return "its counts differ: " + ", ".join(f"{count} {name}" for name, count in counts.items())
    questions = zip(fields["questions"], fields["options"], fields["answers"], strict=True)
    problems = (_question_problem(number, *question) for number, question in enumerate(questions, 1))
    return next(filter(None, problems), "") or _text_problem(fields)


def _question_problem(number: int, question: Any, options: Any, answer: Any) -> str:
    if not isinstance(question, str):
        return f"question {number} must be a text, and is a {type(question).__name__}"
    if not isinstance(options, list) or len(options) != len(LETTERS) or not all(isinstance(o, str) for o in options):
        return f"question {number} must have {len(LETTERS)} options that are texts, and has {options!r:.80}"
    if not isinstance(answer, str) or answer not in LETTERS:
        return f"the answer to question {number} is {answer!r:.40}: it must be one of {', '.join(LETTERS)}"
    return ""


def _text_problem(fields: dict[str, Any]) -> str:
    """JSON may spell half a character, which is no text."""
    try:
        "".join([fields["article"], *fields["questions"], *itertools.chain(*fields["options"])]).encode()
    except UnicodeEncodeError as error:
        return f"it holds the half character {error.object[error.start]!r}, which is no text"
    return ""


def with_option(question: str, option: str) -> str:
    """The question with the option in each of its blanks, which are runs of `_`; without any, the option behind it."""
    filled, blanks = re.subn("_+", lambda _: option, question)
    return filled if blanks else f"{question} {option}"


def race_examples(articles: Sequence[Article], tokenizer: Tokenizer) -> list[Example]:
    """An example for each question, its text a the article and text b the question with an option.

    Named by the article and the question's number from 0: `middle/1#0`.
    """
    texts = as_ids(tokenizer, (article.text for article in articles))
    whole = (
        with_option(question, option)
        for article in articles
        for question, options in zip(article.questions, article.options, strict=True)
        for option in options
    )
    questions = as_ids(tokenizer, whole)
    return [
        Example(f"{article.name}#{number}", article.group, answer, tuple((text, next(questions)) for _ in LETTERS))
        for article, text in zip(articles, texts, strict=True)
        for number, answer in enumerate(article.answers)
    ]


def _read(files: Files, tokenizer: Tokenizer, seq_length: int) -> list[Example]:
    return race_examples(read_articles(files), tokenizer)


RACE = Task(LETTERS, BertForMultipleChoice, {"choices": len(LETTERS)}, _read, sequences=len(LETTERS))
