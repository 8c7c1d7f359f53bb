"""What a task is made of: classes, a model and a reader of its files."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron.model import BertEncoder
from megatron.tasks.examples import Example
from megatron.tokenizer import Tokenizer


class Files(NamedTuple):
    """What is to be read.

    paths: files or folders, and `flag`, what named them.
    leave_out: given a sentence on lines that are malformed and left out; where it is None such lines are errors.
    """

    paths: Sequence[str]
    flag: str
    leave_out: Callable[[str], None] | None = None


# (files, tokenizer, sequence length) -> examples; ValueError where the files are not as they should be.
Reader = Callable[[Files, Tokenizer, int], list[Example]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task whose examples are scored by a head on BERT's pooled state.

    Attributes:
        classes: names of the answers, in the order of the model's scores.
        kind, options: the model, and what it is told of its head.
        read: reads files.
        sequences: pairs of texts in an example.
    """

    classes: tuple[str, ...]
    kind: type[BertEncoder]
    options: dict[str, Any]
    read: Reader
    sequences: int = 1
