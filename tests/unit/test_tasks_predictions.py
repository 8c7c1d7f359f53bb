"""Accuracies are counts of a file of predictions, and an ensemble is the mean of the scores."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.tasks.predictions import Prediction, count_correct, ensemble, read_predictions, write_predictions

LETTERS = ("A", "B", "C", "D")


def predictions(seed: int, count: int = 9) -> list[Prediction]:
    """Random ones of the same questions."""
    scores, answers = np.random.default_rng(seed), np.random.default_rng(0).integers(4, size=count)
    rows = scores.dirichlet([1.0] * 4, size=count)
    groups = ["middle", "high"]
    return [
        Prediction(f"{groups[i % 2]}/{i}#0", groups[i % 2], tuple(row.tolist()), LETTERS[answers[i]], LETTERS)
        for i, row in enumerate(rows)
    ]


def test_counts_are_those_of_the_file(tmp_path: Path) -> None:
    found = predictions(1)
    write_predictions(str(tmp_path / "p.jsonl"), found)
    assert read_predictions(str(tmp_path / "p.jsonl")) == found
    records = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    counts = count_correct(found)
    assert list(counts) == ["middle", "high", "all"]
    for group in ("middle", "high"):
        mine = [r for r in records if r["id"].startswith(group)]
        right = sum(LETTERS[int(np.argmax(r["scores"]))] == r["answer"] for r in mine)
        assert counts[group] == (right, len(mine))
        assert right == sum(r["chosen"] == r["answer"] for r in mine)
    assert counts["all"] == (counts["middle"].correct + counts["high"].correct, 9)


def test_the_tool_averages_scores(repository: Path, tmp_path: Path) -> None:
    several = [predictions(seed, 40) for seed in range(5)]
    for seed, found in enumerate(several):
        order = found if seed == 0 else found[::-1]
        write_predictions(str(tmp_path / f"{seed}.jsonl"), order)
    files = [str(tmp_path / f"{seed}.jsonl") for seed in range(5)]
    words = [sys.executable, str(repository / "tools/ensemble_race.py"), *files, "--output", str(tmp_path / "e.jsonl")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=repository)
    mean = np.mean([[p.scores for p in found] for found in several], axis=0)
    right = sum(LETTERS[c] == p.answer for c, p in zip(mean.argmax(axis=1), several[0], strict=True))
    assert "ensemble of 5: " in done.stdout and done.stdout.strip().endswith(f"({right} of 40)")
    together = read_predictions(str(tmp_path / "e.jsonl"))
    np.testing.assert_allclose([p.scores for p in together], mean, rtol=1e-12)
    assert [p.id for p in together] == [p.id for p in several[0]]


def test_predictions_of_other_questions_are_refused() -> None:
    mine = predictions(1)
    with pytest.raises(ValueError, match="number 2 are of other examples than the first: middle/8#0"):
        ensemble([mine, predictions(2)[:-1]])
    other = [Prediction(p.id, p.group, p.scores, "A" if p.answer != "A" else "B", p.classes) for p in predictions(3)]
    with pytest.raises(ValueError, match="number 3 have another answer or other options for middle/0#0"):
        ensemble([mine, predictions(2), other])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: it must be a JSON object with id"),
        ("[]", "line 2: it must be a JSON object with id"),
        ("[" * 100_000, "line 2: it must be a JSON object with id"),
        ('{"id": "x", "group": "g", "scores": [1], "classes": ["A"], "answer": "B"}', "line 2: it must have a finite"),
        ('{"id": "x", "group": "g", "scores": [NaN], "classes": ["A"], "answer": "A"}', "line 2: it must have"),
        ("", "there are no predictions"),
        ("twice", "line 2: middle/0#0 is there twice"),
    ],
)
def test_a_file_that_is_none_is_named(repository: Path, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    write_predictions(str(path), predictions(1, 1))
    first = path.read_text()
    path.write_text(first + (first if line == "twice" else line + "\n") if line else "")
    done = subprocess.run(
        [sys.executable, str(repository / "tools/ensemble_race.py"), str(path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and f"{path}" in done.stderr and words in done.stderr


def test_a_place_for_the_mean_scores_is_looked_at_first(repository: Path, tmp_path: Path) -> None:
    """Before the files are read: the sentence is of the place, though there is no such file either."""
    words = [sys.executable, str(repository / "tools/ensemble_race.py"), "none.jsonl", "--output", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: --output {tmp_path}: it is a folder, and must be a file\n"
