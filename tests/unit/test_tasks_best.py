"""The best epoch of a fine-tuning where its checkpoint cannot be written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing import SaveError
from megatron.tasks.best import Best
from megatron.tasks.predictions import Prediction


def predictions(right: int) -> list[Prediction]:
    return [Prediction(f"q{n}", "all", (1.0, 0.0), "A" if n < right else "B", ("A", "B")) for n in range(10)]


def test_an_epoch_that_could_not_be_kept_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept before stays the measure, so that a later epoch which is better than that is kept."""
    scores = tmp_path / "scores.jsonl"
    checkpoint = SimpleNamespace(save=str(tmp_path), load=None)
    config: Any = SimpleNamespace(checkpoint=checkpoint, task=SimpleNamespace(predictions_file=str(scores)))
    best, told, kept = Best(config, 10), list[str](), list[int]()

    def save(run: Any, *_: object) -> None:
        if run.trainee.state.iteration == 20:
            raise SaveError("the disk is full")
        kept.append(run.trainee.state.iteration)

    monkeypatch.setattr(best, "_save", save)
    seen = []
    for epoch, right in enumerate((3, 8, 5, 4), 1):
        run: Any = SimpleNamespace(
            trainee=SimpleNamespace(state=SimpleNamespace(iteration=10 * epoch)),
            world=SimpleNamespace(reports=True),
            audience=SimpleNamespace(on_message=told.append),
        )
        best.offer(run, epoch, predictions(right))
        lines = [json.loads(line) for line in scores.read_text().splitlines()]
        seen.append(sum(line["answer"] == "A" for line in lines if "answer" in line))
    assert kept == [10, 30]
    assert seen == [3, 3, 5, 5]  # the scores are those of the weights that are kept
    assert told == ["the best epoch could not be kept: the disk is full"]
