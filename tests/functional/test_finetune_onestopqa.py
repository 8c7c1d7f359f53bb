"""A small encoder learns real questions in RACE's layout by heart, and the accuracies are those of its predictions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.finetuning import run_finetune, task_flags
from tests.harness.ranks import Ranks
from tests.harness.runs import reporting

STEPS = 60


@pytest.fixture(scope="module")
def passages(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty real passages, twelve of middle and eight of high, with three questions each; both sets are the same."""
    source, folder = shared / "data" / "onestopqa_race_layout" / "train", tmp_path_factory.mktemp("race")
    for group, number in (("middle", 12), ("high", 8)):
        (folder / "train" / group).mkdir(parents=True)
        for file in sorted((source / group).iterdir())[:number]:
            shutil.copy(file, folder / "train" / group)
    shutil.copy(shared / "data" / "bert" / "bert-base-uncased-vocab.txt", folder / "vocab.txt")
    return folder


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, {"tensor_model_parallel_size": 2})],
)
def test_real_questions_are_learned(
    ranks: Ranks, passages: Path, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    """At least 95 % of 60 questions after 60 steps; the replicas' batches and the questions do not divide."""
    sizes = {"hidden_size": 64, "seq_length": 64, "max_position_embeddings": 64}
    batches = {"micro_batch_size": 4, "global_batch_size": 16, "keep_last": True, "epochs": STEPS // 4, "lr": 2e-3}
    files = {"valid_data": passages / "train", "predictions_file": tmp_path / "p.jsonl"}
    run = reporting(ranks(world, run_finetune, task_flags("RACE", passages, **sizes, **batches, **files, **layout)))
    assert len(run.steps) == STEPS
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = {
        f"{file.parent.name}/{file.stem}#{i}": answer
        for file in (passages / "train").glob("*/*.txt")
        for i, answer in enumerate(json.loads(file.read_text(encoding="utf-8"))["answers"])
    }
    chosen = {line["id"]: "ABCD"[line["scores"].index(max(line["scores"]))] for line in lines}
    assert len(lines) == len(answers) == 60 and chosen.keys() == answers.keys()
    right = {g: sum(chosen[k] == a for k, a in answers.items() if k.startswith(g)) for g in ("middle", "high")}
    best = max(run.evaluations, key=lambda e: e["accuracy"])
    assert (best["middle-correct"], best["high-correct"]) == (right["middle"], right["high"])
    assert (best["middle-questions"], best["high-questions"], best["all-questions"]) == (36, 24, 60)
    assert best["accuracy"] == sum(right.values()) / 60 >= 0.95
