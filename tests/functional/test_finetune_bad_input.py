"""What can be wrong with a fine-tuning: each is told in a sentence, the exit code is 2, nothing is written."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.model import BertModel, GPTModel, TransformerConfig
from megatron.tasks import main
from tests.harness import runs
from tests.harness.finetuning import task_flags
from tests.harness.race_files import VOCABULARY, write_race, write_tsv, write_vocabulary
from tests.harness.ranks import Ranks
from tests.harness.saved_models import save_model


@pytest.fixture
def race(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path)
    write_race(tmp_path / "train", {"middle": 2})
    write_race(tmp_path / "dev", {"high": 2}, seed=1)
    return tmp_path


complaints = functools.partial(runs.complaints, main=main.main)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": "SQuAD"}, "--task SQuAD: accepted are RACE, MNLI, QQP"),
        ({"task": None}, "--task is not given"),
        ({"train_data": None}, "--train-data is not given: training needs it, --eval-only does not"),
        ({"valid_data": None}, "--valid-data is not given"),
        ({"epochs": None}, "--epochs is not given: training needs it, --eval-only does not"),
        ({"epochs": -1}, "--epochs -1: it must be at least 0"),
        ({"train_iters": 5}, "--train-iters is not known"),
        ({"eval_only": True}, "--load is not given: --eval-only needs the folder of a fine-tuned model's checkpoints"),
        ({"epochs": 0}, "--load is not given: --eval-only needs"),
        ({"train_data": "nowhere"}, "--train-data nowhere: there are no questions in it"),
        (
            {"keep_last": None},
            "--global-batch-size 8: --train-data has only 4 examples, give a smaller one, or --keep-last",
        ),
        ({"seq_length": 6}, "--seq-length 6: "),
        ({"seq_length": 3}, "--seq-length 3: it must be at least 4"),
        ({"seq_length": 17}, "--seq-length 17: it must not be above --max-position-embeddings 16"),
        (
            {"lr_warmup_fraction": None, "lr_warmup_iters": 9, "keep_last": True},
            "9: it must not be above the iterations of --epochs, which are 2",
        ),
        ({"pretrained_checkpoint": "nowhere"}, "--pretrained-checkpoint nowhere: there is no such folder"),
        ({"predictions_file": "nowhere/p.jsonl"}, "--predictions-file nowhere/p.jsonl: it must be a file in a folder"),
        ({"predictions_file": "."}, "--predictions-file .: it is a folder, and must be a file"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 50}, "[CLS]"),
        ({"padded_vocab_size": 20}, "--padded-vocab-size 20: it must be at least 49, the ids of the tokenizer"),
        ({"keep_last_checkpoints": 0}, "--keep-last-checkpoints 0: it must be at least 1"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], race: Path, changes: dict[str, Any], sentence: str
) -> None:
    told = complaints(capsys, task_flags("RACE", race, **({"save": race / "saved", "keep_last": True} | changes)))
    assert any(sentence in line for line in told), told
    assert not (race / "saved").exists()


def test_a_race_file_is_named_with_what_is_wrong(capsys: pytest.CaptureFixture[str], race: Path) -> None:
    path = race / "dev" / "high" / "1.txt"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"answers": ["A", "E"]}))
    assert complaints(capsys, task_flags("RACE", race)) == [
        f"{path}: the answer to question 2 is 'E': it must be one of A, B, C, D"
    ]


def test_a_glue_line_is_named_with_its_columns(capsys: pytest.CaptureFixture[str], race: Path) -> None:
    names = ("id", "question1", "question2", "is_duplicate")
    good = [str(1), "w1", "w2", "0"]
    train = write_tsv(race / "train.tsv", names, [good, good[:3]])
    write_tsv(race / "dev.tsv", names, [good])
    told = complaints(capsys, task_flags("QQP", race))
    assert told == [f"--train-data {train}, line 3: it has 3 columns, and the first line names 4"]
    write_tsv(race / "dev.tsv", names, [good, good])
    told = complaints(capsys, task_flags("QQP", race, skip_malformed_lines=True))
    assert told == ["--valid-data: dev#1 is there twice: give each folder and each question once"]


def test_a_run_goes_on_with_epochs_of_the_same_length(capsys: pytest.CaptureFixture[str], race: Path) -> None:
    saved = {"save": race / "saved", "keep_last": True}
    main.main(task_flags("RACE", race, **saved, exit_interval=1))
    going_on = saved | {"load": race / "saved"}
    told = complaints(capsys, task_flags("RACE", race, **going_on, micro_batch_size=1, global_batch_size=2))
    assert told == [
        f"--load {race / 'saved'}: its epochs have 1 iterations, and here they have 2: go on with its --train-data, "
        "--global-batch-size and --keep-last, or --finetune to begin anew with its weights"
    ]
    main.main(task_flags("RACE", race, **going_on))
    told = complaints(capsys, task_flags("RACE", race, **going_on, epochs=1))
    assert told == [
        f"--epochs 1: they are 1 iterations, and the checkpoint in {race / 'saved'} is of iteration 2 already"
    ]


SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16}
Make = Callable[[TransformerConfig, int], Any]


@pytest.mark.parametrize(
    ("kind", "changes", "vocabulary", "sentence"),
    [
        (GPTModel, {}, len(VOCABULARY), "its model is gpt, it must be a bert"),
        (BertModel, {"hidden_size": 16}, len(VOCABULARY), "--hidden-size 32: the model of the checkpoint in"),
        (BertModel, {"num_layers": 3}, len(VOCABULARY), "--num-layers 2: the model of the checkpoint in"),
        (BertModel, {"norm_position": "post"}, len(VOCABULARY), "--norm-position pre: the model of the checkpoint"),
        (BertModel, {}, 50, "a tokenizer of 49 tokens: the model of the checkpoint in"),
    ],
)
def test_a_pretrained_model_of_another_kind_is_refused(
    capsys: pytest.CaptureFixture[str],
    ranks: Ranks,
    race: Path,
    kind: Make,
    changes: dict[str, Any],
    vocabulary: int,
    sentence: str,
) -> None:
    ranks(1, save_model, str(race / "pretrained"), kind, SIZES | changes, vocabulary)
    asked = {"pretrained_checkpoint": race / "pretrained", "save": race / "saved", "keep_last": True}
    told = complaints(capsys, task_flags("RACE", race, **asked))
    assert any(sentence in line for line in told), told
    assert not (race / "saved").exists()


@pytest.mark.parametrize(("kind", "name"), [(GPTModel, "gpt"), (BertModel, "bert")])
def test_a_model_of_another_kind_is_not_gone_on_from(
    capsys: pytest.CaptureFixture[str], ranks: Ranks, race: Path, kind: Make, name: str
) -> None:
    ranks(1, save_model, str(race / "other"), kind, SIZES, len(VOCABULARY))
    for asked in ({"keep_last": True}, {"eval_only": True}, {"keep_last": True, "finetune": True}):
        assert complaints(capsys, task_flags("RACE", race, load=race / "other", **asked)) == [
            f"--load {race / 'other'}: its checkpoint is of {name}, and a model fine-tuned for RACE is "
            "bert-multiple-choice; --pretrained-checkpoint takes the encoder of any BERT"
        ]
