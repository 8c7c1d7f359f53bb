"""What a model thinks of each example, how often it is right, and the file of JSON lines that keeps it."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megatron.base.files import atomic_write


class Count(NamedTuple):
    """So many right of so many."""

    correct: int
    questions: int

    @property
    def accuracy(self) -> float:
        """The part that is right; 0 where there is nothing."""
        return self.correct / self.questions if self.questions else 0.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The scores of one example.

    Attributes:
        id: the example's name; `group` what it is counted in.
        scores: a probability for each class.
        answer: the right class by its name, one of `classes`, which belong to the scores in order.
    """

    id: str
    group: str
    scores: tuple[float, ...]
    answer: str
    classes: tuple[str, ...]

    @property
    def chosen(self) -> str:
        """The class of the highest score, the first of several."""
        return self.classes[self.scores.index(max(self.scores))]

    @property
    def correct(self) -> bool:
        """Whether the right class is chosen."""
        return self.chosen == self.answer


def count_correct(predictions: Iterable[Prediction]) -> dict[str, Count]:
    """How many are right in each group, in the order in which groups appear, and in "all" of them at the end."""
    counts: dict[str, Count] = {}
    total = Count(0, 0)
    for prediction in predictions:
        correct, questions = counts.get(prediction.group, Count(0, 0))
        counts[prediction.group] = Count(correct + prediction.correct, questions + 1)
        total = Count(total.correct + prediction.correct, total.questions + 1)
    return {**counts, "all": total}


def count_words(counts: dict[str, Count]) -> str:
    """`middle 80.00 % (8 of 10), all 80.00 % (8 of 10)`."""
    parts = (f"{group} {100 * c.accuracy:.2f} % ({c.correct} of {c.questions})" for group, c in counts.items())
    return ", ".join(parts)


def write_predictions(path: str, predictions: Iterable[Prediction]) -> None:
    """One JSON object a line: id, group, scores, their classes, answer, chosen. The file appears whole or not."""
    with atomic_write(path) as stream:
        for prediction in predictions:
            record = {
                "id": prediction.id,
                "group": prediction.group,
                "scores": prediction.scores,
                "classes": prediction.classes,
                "answer": prediction.answer,
                "chosen": prediction.chosen,
            }
            stream.write(json.dumps(record) + "\n")


def read_predictions(path: str) -> list[Prediction]:
    """The lines of a file that `write_predictions` wrote; ValueError names the first line that is none."""
    found: list[Prediction] = []
    names: set[str] = set()
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                found.append(_prediction(line, f"{path}, line {number}"))
                if found[-1].id in names:
                    raise ValueError(f"{path}, line {number}: {found[-1].id} is there twice")
                names.add(found[-1].id)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is not UTF-8: {error}") from None
    if not found:
        raise ValueError(f"{path}: there are no predictions in it")
    return found


def _prediction(line: str, where: str) -> Prediction:
    try:
        record: dict[str, Any] = json.loads(line)
        scores, classes = tuple(map(float, record["scores"])), tuple(map(str, record["classes"]))
        prediction = Prediction(str(record["id"]), str(record["group"]), scores, str(record["answer"]), classes)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{where}: it must be a JSON object with id, group, scores, classes and answer") from None
    if prediction.answer not in classes or len(classes) != len(scores) or not all(map(math.isfinite, scores)):
        raise ValueError(f"{where}: it must have a finite score for each class, the answer among them")
    return prediction


def ensemble(several: Sequence[Sequence[Prediction]]) -> list[Prediction]:
    """Of each example the mean of the scores of several models, in the order of the first.

    Raises ValueError where they are not of the same examples, with the same answers and options.
    """
    first, *others = [{p.id: p for p in predictions} for predictions in several]
    for number, other in enumerate(others, 2):
        if other.keys() != first.keys():
            different = sorted(other.keys() ^ first.keys())
            raise ValueError(f"the predictions number {number} are of other examples than the first: {different[0]}")
        for name, prediction in first.items():
            mine = (other[name].group, other[name].answer, other[name].classes)
            if mine != (prediction.group, prediction.answer, prediction.classes):
                raise ValueError(f"the predictions number {number} have another answer or other options for {name}")
    return [
        dataclasses.replace(prediction, scores=_mean([prediction.scores, *(other[name].scores for other in others)]))
        for name, prediction in first.items()
    ]


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))
