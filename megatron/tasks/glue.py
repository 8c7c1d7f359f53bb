"""MNLI and QQP from the tab-separated files of GLUE (Wang et al., arXiv:1804.07461): two sentences and a class."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.base.complaints import raise_joined
from megatron.base.words import counted
from megatron.data.bert_dataset import shortened
from megatron.model import BertForClassification
from megatron.tasks.examples import Example, as_ids, room_for_pair
from megatron.tasks.task import Files, Task
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a task's files look like: the first line names the columns, of which these are read.

    Attributes:
        key: tells the lines of a file apart.
        sentences: the two texts.
        label: the class, one of `classes`.
    """

    key: str
    sentences: tuple[str, str]
    label: str
    classes: tuple[str, ...]


# MNLI's train.tsv has 12 columns and its dev_(mis)matched.tsv 16, for they have more annotators; QQP's have 6. The test
# files have no label. The numbers of MNLI's classes are those of Megatron-LM.
LAYOUTS = {
    "MNLI": Layout("index", ("sentence1", "sentence2"), "gold_label", ("contradiction", "entailment", "neutral")),
    "QQP": Layout("id", ("question1", "question2"), "is_duplicate", ("0", "1")),
}


class Line(NamedTuple):
    """What is read of a line; `file` is the name of its file without the extension."""

    file: str
    key: str
    first: str
    second: str
    label: int


def read_lines(files: Files, layout: Layout) -> list[Line]:
    """The lines of files, in order. A quote is a character like any other.

    Raises `ConfigError` with a sentence that names the first line which is not as it should be, of each file. Where
    malformed lines are left out, those with another number of columns than the first one are meant, of which the
    published train.tsv of QQP has a few.
    """
    found: list[Line] = []
    problems: list[str] = []
    for path in files.paths:
        before = len(found)
        try:
            found += _lines_of(Path(path), layout, files.leave_out)
        except OSError as error:
            problems.append(f"{files.flag} {path}: it cannot be read: {error.strerror or error}")
        except ValueError as error:
            problems.append(f"{files.flag} {error}")
        else:
            if len(found) == before:
                problems.append(f"{files.flag} {path}: there are no lines in it behind that of the columns' names")
    raise_joined(problems)
    return found


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The columns of each line that is not empty, and its number from 1."""
    with open(path, "rb") as stream:
        for number, content in enumerate(stream, 1):
            try:
                line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"{path}, line {number}"
                raise ValueError(f"{where}: it is not UTF-8 ({error.reason} at its byte {error.start})") from None
            if line.strip():
                yield number, line.rstrip("\r\n").split("\t")


def _lines_of(path: Path, layout: Layout, leave_out: Callable[[str], None] | None) -> list[Line]:
    rows = _rows(path)
    _, names = next(rows, (1, []))
    wanted = (layout.key, *layout.sentences, layout.label)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(f"{path}, line 1: it must name the columns, and lacks {', '.join(missing)}")
    places = [names.index(name) for name in wanted]
    found, malformed = [], []
    for number, columns in rows:
        if len(columns) == len(names):
            key, first, second, label = (columns[place] for place in places)
            found.append(Line(path.stem, key, first, second, _class_of(label, layout, f"{path}, line {number}")))
        elif leave_out is None:
            raise ValueError(
                f"{path}, line {number}: it has {len(columns)} columns, and the first line names {len(names)}"
            )
        else:
            malformed.append(number)
    if leave_out is not None and malformed:
        leave_out(f"{path}: {counted(len(malformed), 'malformed line')} left out, the first is line {malformed[0]}")
    return found


def _class_of(label: str, layout: Layout, where: str) -> int:
    if label not in layout.classes:
        raise ValueError(f"{where}: {layout.label} is {label!r:.40}: it must be one of {', '.join(layout.classes)}")
    return layout.classes.index(label)


def glue_examples(lines: Sequence[Line], tokenizer: Tokenizer, seq_length: int) -> list[Example]:
    """An example for each line, named by its file and key.

    Where both sentences together are too long, tokens are taken from the end of the longer one, one by one.
    """
    room, found = room_for_pair(seq_length), []
    first = as_ids(tokenizer, (line.first for line in lines))
    second = as_ids(tokenizer, (line.second for line in lines))
    for line, a, b in zip(lines, first, second, strict=True):
        kept = shortened(len(a), len(b), room)
        pair = (a[: kept[0]], b[: kept[1]])
        found.append(Example(f"{line.file}#{line.key}", line.file, line.label, (pair,)))
    return found


def _task(layout: Layout) -> Task:
    def read(files: Files, tokenizer: Tokenizer, seq_length: int) -> list[Example]:
        return glue_examples(read_lines(files, layout), tokenizer, seq_length)

    return Task(layout.classes, BertForClassification, {"classes": len(layout.classes)}, read)


MNLI, QQP = (_task(LAYOUTS[name]) for name in ("MNLI", "QQP"))
