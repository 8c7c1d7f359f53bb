"""Fine-tuning gives the same at any layout, goes on bit for bit, counts every question once and keeps its best."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.model import BertModel
from tests.harness.closeness import assert_close
from tests.harness.finetuning import run_finetune, task_flags
from tests.harness.race_files import VOCABULARY, write_race, write_tsv, write_vocabulary
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, assemble, reporting
from tests.harness.saved_models import save_model

QUESTIONS = 14  # of the development set, which no batch divides


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 questions to train on, 6 of middle and 8 of high to evaluate."""
    folder = tmp_path_factory.mktemp("race")
    write_vocabulary(folder)
    write_race(folder / "train", {"middle": 10, "high": 5})
    write_race(folder / "dev", {"middle": 3, "high": 4}, seed=1)
    return folder


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def counted(found: list[dict[str, Any]]) -> dict[str, int]:
    """Right answers by group, counted from a file of predictions alone."""
    right = Counter({r["group"]: 0 for r in found})
    right.update(r["group"] for r in found if r["classes"][int(np.argmax(r["scores"]))] == r["answer"])
    return dict(right)


LAYOUTS = [
    (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    (2, {"pipeline_model_parallel_size": 2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}),
    (2, {"use_distributed_optimizer": True}),
    (3, {"micro_batch_size": 1, "global_batch_size": 6}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_gives_the_serial_run(
    ranks: Ranks, race: Path, tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    """Losses, weights and scores; with a last batch of an epoch that is not full, and replicas of unequal shares."""
    chosen: dict[str, Any] = {"params_dtype": "float64", "keep_last": True, "global_batch_size": 8}
    chosen |= {name: layout[name] for name in ("global_batch_size", "num_layers") if name in layout}
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    serial = ranks(1, run_finetune, task_flags("RACE", race, predictions_file=one, **chosen))
    split = ranks(world, run_finetune, task_flags("RACE", race, predictions_file=other, **(chosen | layout)))
    assert len(serial[0].steps) == 2 * math.ceil(30 / chosen["global_batch_size"])
    assert_close(reporting(split).series("loss"), serial[0].series("loss"), 1e-9)
    weights = [assemble(run) for run in (split, serial)]
    for held in weights:  # the same is added to all options, so that its gradient is rounding alone
        del held["multichoice_head.bias"]
    assert_close(*weights, 1e-9, floor=1e-3)
    mine, theirs = records(other), records(one)
    assert [r["id"] for r in mine] == [r["id"] for r in theirs]
    np.testing.assert_allclose([r["scores"] for r in mine], [r["scores"] for r in theirs], rtol=1e-9)
    assert reporting(split).evaluations[-1]["all-questions"] == QUESTIONS


def test_accuracies_are_those_of_the_predictions(ranks: Ranks, race: Path, tmp_path: Path) -> None:
    """Every question once, on three replicas; the loss is the mean of the right answers' logarithms."""
    path = tmp_path / "p.jsonl"
    words = task_flags("RACE", race, epochs=1, micro_batch_size=1, global_batch_size=3, predictions_file=path)
    (found,) = reporting(ranks(3, run_finetune, words)).evaluations
    lines = records(path)
    expected = {f"{g}/{i}#{q}" for g, n in (("middle", 3), ("high", 4)) for i in range(n) for q in range(2)}
    assert Counter(r["id"] for r in lines) == dict.fromkeys(expected, 1)
    right = counted(lines)
    assert found["middle-correct"] == right["middle"] and found["middle-questions"] == 6
    assert found["high-correct"] == right["high"] and found["high-questions"] == 8
    assert found["all-correct"] == sum(right.values())
    assert found["accuracy"] == sum(right.values()) / QUESTIONS
    losses = [-math.log(r["scores"][r["classes"].index(r["answer"])]) for r in lines]
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def assert_bit_equal(actual: Outcome, expected: Outcome) -> None:
    for mine, theirs in ((actual.local, expected.local), (actual.rng, expected.rng)):
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_array_equal(mine[name], values, err_msg=name)


@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_goes_on_inside_an_epoch_bit_for_bit(ranks: Ranks, race: Path, tmp_path: Path, stop: int) -> None:
    """Also at the end of one, where the evaluation comes again, in case that the run was ended before it."""
    chosen = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "keep_last": True, "epochs": 3}
    words = task_flags("RACE", race, **chosen)
    whole = ranks(2, run_finetune, [*words, "--save", str(tmp_path / "whole")])
    saving = [*words, "--save", str(tmp_path / "parts")]
    stopped = ranks(2, run_finetune, [*saving, "--exit-interval", str(stop)])
    resumed = ranks(2, run_finetune, [*saving, "--load", str(tmp_path / "parts")])
    parts = [reporting(run) for run in (stopped, resumed, whole)]
    for name in ("loss", "grad-norm", "lr"):
        series = [part.series(name) for part in parts]
        assert series[0] + series[1] == series[2] and len(series[0]) == stop
    assert parts[0].evaluations + parts[1].evaluations[stop == 4 :] == parts[2].evaluations
    assert [e["epoch"] for e in parts[2].evaluations] == [1, 2, 3]
    for mine, theirs in zip(resumed, whole, strict=True):
        assert_bit_equal(mine, theirs)
    kept = [sorted(p.name for p in (tmp_path / run / "best").iterdir()) for run in ("parts", "whole")]
    best = max(parts[2].evaluations, key=lambda e: (e["accuracy"], -e["epoch"]))
    assert kept[0] == kept[1] == [f"iter_{best['iteration']:07d}", "latest_checkpointed_iteration.txt"]


def test_the_best_of_another_run_is_left_alone(ranks: Ranks, race: Path, tmp_path: Path) -> None:
    """A run that begins anew in its folder adds its own best, by its own measure."""
    words = task_flags("RACE", race, epochs=1, save=tmp_path)
    ranks(1, run_finetune, words)
    anew = [*words, "--global-batch-size", "10", "--micro-batch-size", "5", "--epochs", "2", "--lr", "0"]
    told = ranks(1, run_finetune, [*anew, "--eval-at-start"])[0].messages
    assert any(
        line.startswith(f"{tmp_path / 'best'}: this run does not go on from the best of iteration 3 there")
        for line in told
    )
    assert sorted(p.name for p in (tmp_path / "best").glob("iter_*")) == ["iter_0000000", "iter_0000003"]


def test_scores_of_a_best_that_was_kept_before(ranks: Ranks, race: Path, tmp_path: Path) -> None:
    """Written where its evaluation comes again, as --eval-only gives them; else the run tells how to get them."""
    words = task_flags("RACE", race, lr=0, save=tmp_path)  # no epoch is better than the first
    ranks(1, run_finetune, [*words, "--exit-interval", "3"])
    files = [tmp_path / name for name in ("again.jsonl", "alone.jsonl", "never.jsonl")]
    words += ["--load", str(tmp_path)]
    ranks(1, run_finetune, [*words, "--predictions-file", str(files[0])])
    asked = {"train_data": None, "epochs": None, "lr": None, "lr_warmup_fraction": None, "eval_only": True}
    ranks(1, run_finetune, task_flags("RACE", race, load=tmp_path / "best", predictions_file=files[1], **asked))
    assert files[0].read_text() == files[1].read_text()
    told = ranks(1, run_finetune, [*words, "--predictions-file", str(files[2])])[0].messages
    assert not files[2].exists()
    assert any(line.startswith(f"--predictions-file {files[2]}: only an epoch that is better") for line in told)
    # how many are right of other questions says nothing of it
    told = ranks(1, run_finetune, [*words, "--valid-data", str(race / "dev" / "high")])[0].messages
    assert sorted(p.name for p in (tmp_path / "best").glob("iter_*")) == ["iter_0000003", "iter_0000006"]
    assert any("does not go on from the best of iteration 3 there" in line for line in told)


def test_what_fills_no_batch_is_left_out_of_an_epoch(ranks: Ranks, race: Path) -> None:
    run = ranks(1, run_finetune, task_flags("RACE", race, epochs=3))[0]
    assert run.series("consumed-samples")[-1] == 3 * 24 and run.progress["run"]["iteration"] == 9


def test_the_rate_of_learning_spans_all_epochs(ranks: Ranks, race: Path) -> None:
    words = task_flags("RACE", race, epochs=3, lr=1e-3, lr_warmup_fraction=1 / 3, lr_decay_style="linear")
    rates = ranks(1, run_finetune, words)[0].series("lr")
    assert rates == pytest.approx([1e-3 * x for x in (0, 1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])


def test_fp16_scales_the_loss_of_a_question(ranks: Ranks, race: Path) -> None:
    """Scale and count agree: the gradient's norm is that of float32, and no step is skipped."""
    chosen = {"epochs": 1, "hidden_size": 16, "num_attention_heads": 2, "keep_last": True}
    single = ranks(1, run_finetune, task_flags("RACE", race, **chosen))[0]
    half = ranks(1, run_finetune, task_flags("RACE", race, fp16=True, initial_loss_scale=2.0**14, **chosen))[0]
    # Rounding takes up to 5 % of norms as small as these; a wrong count or scale would be a factor of 2 or more.
    assert half.series("grad-norm") == pytest.approx(single.series("grad-norm"), rel=0.2)
    assert half.progress["run"]["skipped_iterations"] == 0


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_saved_model_is_evaluated_at_another_layout(ranks: Ranks, race: Path, tmp_path: Path, epochs: int) -> None:
    """The best epoch's scores come out of `best` again: the same bits on one rank, close on two stages."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("trained", "same", "staged")}
    words = task_flags("RACE", race, epochs=epochs, save=tmp_path / "saved", predictions_file=files["trained"])
    trained = ranks(1, run_finetune, words)[0]
    asked = {"train_data": None, "epochs": None, "lr": None, "lr_warmup_fraction": None, "eval_only": True}
    asked |= {"load": tmp_path / "saved" / "best"}
    same = ranks(1, run_finetune, task_flags("RACE", race, predictions_file=files["same"], **asked))[0]
    stages = {"pipeline_model_parallel_size": 2, "predictions_file": files["staged"]}
    staged = reporting(ranks(2, run_finetune, task_flags("RACE", race, **stages, **asked)))
    best = max(trained.evaluations, key=lambda e: (e["accuracy"], -e["epoch"]))
    for run in (same, staged):
        (found,) = run.evaluations
        assert run.steps == [] and found["all-correct"] == best["all-correct"]
        assert any(line.startswith(f"{tmp_path / 'saved' / 'best'}: middle ") for line in run.messages)
    assert files["same"].read_text() == files["trained"].read_text()
    scores = [[r["scores"] for r in records(files[name])] for name in ("staged", "trained")]
    np.testing.assert_allclose(*scores, rtol=1e-5)


SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("world", "layout", "pooler"),
    [
        (2, {"tensor_model_parallel_size": 2}, True),
        (2, {"pipeline_model_parallel_size": 2, "bf16": True}, True),
        (2, {"tensor_model_parallel_size": 2, "padded_vocab_size": 70}, True),
        (1, {}, False),
    ],
)
def test_the_encoder_begins_with_the_pretrained_one(
    ranks: Ranks, race: Path, tmp_path: Path, world: int, layout: dict[str, Any], pooler: bool
) -> None:
    """Bit for bit by name; the head, and a pooler that is not there, as without it. Learning nothing shows it."""
    sizes = SIZES | {name: layout[name] for name in ("padded_vocab_size",) if name in layout}
    saved = ranks(1, save_model, str(tmp_path), BertModel, sizes, len(VOCABULARY), {"binary_head": pooler})[0]
    chosen = {"epochs": 1, "lr": 0, **layout}
    anew = ranks(world, run_finetune, task_flags("RACE", race, **chosen))
    assert "the whole model begins anew, for there is no --pretrained-checkpoint" in reporting(anew).messages
    fresh = assemble(anew)
    outcomes = ranks(world, run_finetune, task_flags("RACE", race, pretrained_checkpoint=tmp_path, **chosen))
    found = assemble(outcomes)
    dtype = torch.bfloat16 if "bf16" in layout else torch.float32
    rounded = {name: torch.from_numpy(values).to(dtype) for name, values in saved.items() if name in found}
    layers = ["multichoice_head", *([] if pooler else ["pooler.dense"])]
    new = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    new |= set() if pooler else {"embedding.tokentype_embeddings.weight"}
    names = {name for name in found if not name.startswith("optimizer.")}
    assert names - rounded.keys() == new
    for name in names:
        expected = fresh[name] if name in new else rounded[name][: len(found[name])]
        assert torch.equal(found[name].to(dtype), expected.to(dtype)), name
    words = "the head of the task" + ("" if pooler else ", token types, pooler")
    assert f"the encoder begins with iteration 7 of {tmp_path}; new: {words}" in reporting(outcomes).messages


COLUMNS = {
    "MNLI": ("index", "sentence1", "sentence2", "gold_label"),
    "QQP": ("id", "question1", "question2", "is_duplicate"),
}


CLASSES = {"MNLI": ("contradiction", "entailment", "neutral"), "QQP": ("0", "1")}


def pair(i: int, classes: tuple[str, ...]) -> tuple[str, str, str, str]:
    """A line whose class a word of the second sentence gives away."""
    right = i % len(classes)
    return str(i), f"w{i % 9}", f"w{10 + right} w{i % 5}", classes[right]


@pytest.mark.parametrize("task", ["MNLI", "QQP"])
def test_sentence_pairs_are_learned(ranks: Ranks, tmp_path: Path, task: str) -> None:
    write_vocabulary(tmp_path)
    for name, rows in (("train", 60), ("dev", 7)):
        write_tsv(tmp_path / f"{name}.tsv", COLUMNS[task], [pair(i, CLASSES[task]) for i in range(rows)])
    path = tmp_path / "p.jsonl"
    words = task_flags(task, tmp_path, epochs=8, lr=1e-2, hidden_size=64, predictions_file=path)
    run = reporting(ranks(2, run_finetune, words))
    assert run.evaluations[-1]["dev-questions"] == 7
    best = max(run.evaluations, key=lambda e: e["accuracy"])
    assert best["accuracy"] == 1.0 == sum(counted(records(path)).values()) / 7
    assert [r["id"] for r in records(path)] == [f"dev#{i}" for i in range(7)]
