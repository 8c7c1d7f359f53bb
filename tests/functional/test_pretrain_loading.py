"""What a run takes from a checkpoint, and from which: each flag by its effect, each refusal by its sentence."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.checkpointing.convert import from_native
from megatron.checkpointing.convert.native import to_native
from megatron.checkpointing.survey import Survey
from megatron.model import GPTModel
from tests.harness.closeness import assert_close
from tests.harness.ranks import RankError, Ranks
from tests.harness.runs import Outcome, complaints, flags, reporting, run_pretrain, write_documents

CHOSEN: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "eval_iters": 0, "lr_warmup_iters": 1}
LAST = 6
FILE = "iter_0000006/rank_00000.safetensors"
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def words_of(data_path: str, *more: str, **changes: Any) -> list[str]:
    return [*flags(data_path, **{"train_iters": 9, **CHOSEN, **changes}), *more]


@pytest.fixture(scope="module")
def whole(ranks: Ranks, data_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of nine iterations with dropout, and the folder with what it has saved after 2, 4 and 6 of them."""
    folder = tmp_path_factory.mktemp("saved")
    words = words_of(data_path, *DROPOUT, "--save-interval", "2", "--save", str(folder))
    stopped = ranks(1, run_pretrain, [*words, "--exit-interval", str(LAST)])[0]
    rest = ranks(1, run_pretrain, words_of(data_path, *DROPOUT, "--load", str(folder)))[0]
    return folder, Outcome(stopped.steps + rest.steps, [], [], rest.pieces, rest.local, rest.rng, rest.progress)


@pytest.fixture
def copied(whole: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of those checkpoints that a test may damage."""
    return Path(shutil.copytree(whole[0], tmp_path / "copied"))


def assert_same_state(actual: Outcome, expected: Outcome) -> None:
    assert actual.local.keys() == expected.local.keys()
    for name, values in expected.local.items():
        np.testing.assert_array_equal(actual.local[name], values, err_msg=name)


def test_an_iteration_that_is_asked_for(ranks: Ranks, data_path: str, whole: tuple[Path, Outcome]) -> None:
    folder, uninterrupted = whole
    words = words_of(data_path, *DROPOUT, "--load", str(folder), "--ckpt-step", "2")
    outcome = ranks(1, run_pretrain, words)[0]
    assert outcome.series("loss") == uninterrupted.series("loss")[2:]
    assert f"loaded iteration 2 of {folder}" in outcome.messages
    assert_same_state(outcome, uninterrupted)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (flip, "does not match its checksum"),
    "a cut file": (lambda path: os.truncate(path, path.stat().st_size - 5), "bytes, .* were written"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_another_checkpoint_taken_only_when_asked_to(
    ranks: Ranks,
    data_path: str,
    whole: tuple[Path, Outcome],
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    damage, sentence = DAMAGE[name]
    damage(copied / FILE)
    words = words_of(data_path, *DROPOUT, "--load", str(copied))
    (told,) = complaints(capsys, words)
    assert re.match(rf".*{FILE}: .*{sentence}.*; --load-fallback goes on from an earlier one, .* 4$", told)
    outcome = ranks(1, run_pretrain, [*words, "--load-fallback"])[0]
    assert outcome.series("loss") == whole[1].series("loss")[4:]
    assert any(m.startswith("iteration 6 is not whole and is left out: ") and FILE in m for m in outcome.messages)
    assert_same_state(outcome, whole[1])


def test_all_ranks_leave_out_what_one_of_them_finds_damaged(ranks: Ranks, data_path: str, tmp_path: Path) -> None:
    """The second rank's own tensors, which it alone reads."""
    words = words_of(data_path, train_iters=4)
    saving = [*words, "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    whole = ranks(2, run_pretrain, saving)
    path = tmp_path / "saved" / "iter_0000004" / "rank_00001.safetensors"
    flip(path)
    loading = [*words, "--load", str(tmp_path / "saved")]
    with pytest.raises(RankError, match=r"rank 1: .*rank_00001.safetensors: .*; --load-fallback"):
        ranks(2, run_pretrain, loading)
    rest = ranks(2, run_pretrain, [*loading, "--load-fallback"])
    assert reporting(rest).series("loss") == reporting(whole).series("loss")[2:]


def run_from_weights(rank: int, world_size: int, words: Sequence[str], folder: str, dtype: str) -> Outcome:
    """A new run whose model is given the weights of a checkpoint, through no code of loading into a run."""
    survey, provide = Survey.of(folder), pretrain_gpt.provide_model

    def provide_loaded(*args: Any) -> GPTModel:
        model = provide(*args)
        for name, parameter in model.named_parameters():
            values = survey.read(name).to(getattr(torch, dtype))
            parameter.data.zero_()[: len(values)].copy_(values)
        return model

    with mock.patch.object(pretrain_gpt, "provide_model", provide_loaded):
        return run_pretrain(rank, world_size, words)


@pytest.mark.parametrize("more", [[], ["--bf16"]])
def test_finetuning_is_a_new_run_with_loaded_weights(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], more: list[str]
) -> None:
    """With another seed, schedule and split, which need no word; from float32 into 16 bits too. Bit for bit."""
    words = words_of(data_path, *DROPOUT, *more, train_iters=3, seed=7, lr=3e-3, split="50,50,0")
    outcome = ranks(1, run_pretrain, [*words, "--load", str(whole[0]), "--finetune"])[0]
    twin = ranks(1, run_from_weights, words, str(whole[0]), "bfloat16" if more else "float32")[0]
    assert outcome.series("iteration") == [1, 2, 3]
    for name in ("loss", "lr", "grad-norm", "consumed-samples"):
        assert outcome.series(name) == twin.series(name)
    assert_same_state(outcome, twin)
    assert any(f"loaded the weights of iteration 6 of {whole[0]}" in message for message in outcome.messages)
    fresh = ranks(1, run_pretrain, words)[0]
    assert fresh.series("loss")[0] != outcome.series("loss")[0]


def test_finetuning_at_another_layout(ranks: Ranks, data_path: str, whole: tuple[Path, Outcome]) -> None:
    words = words_of(data_path, "--load", str(whole[0]), "--finetune", train_iters=3)
    sharded = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"]
    serial, parallel = ranks(1, run_pretrain, words), ranks(4, run_pretrain, [*words, *sharded])
    assert_close(reporting(parallel).series("loss"), serial[0].series("loss"), 1e-5)


def test_going_on_with_a_new_optimizer(ranks: Ranks, data_path: str, whole: tuple[Path, Outcome]) -> None:
    """The weights, the place in the data and the learning rate are the checkpoint's; the moments begin anew."""
    folder, uninterrupted = whole
    words = words_of(data_path, *DROPOUT, "--load", str(folder), "--no-load-optim")
    outcome = ranks(1, run_pretrain, words)[0]
    for name in ("iteration", "consumed-samples", "lr"):
        assert outcome.series(name) == uninterrupted.series(name)[LAST:]
    losses = outcome.series("loss"), uninterrupted.series("loss")[LAST:]
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]
    assert outcome.progress["optimizer"]["step_count"] == 3
    # Any other optimizer will do.
    other = ranks(1, run_pretrain, [*words, "--optimizer", "sgd", "--params-dtype", "float64"])[0]
    assert_close(other.series("loss")[0], losses[1][0], 0.05)


def test_generators_that_begin_anew(ranks: Ranks, data_path: str, whole: tuple[Path, Outcome]) -> None:
    """They change what is dropped; nothing else, for without dropout all is as if they had been loaded."""
    loading = ["--load", str(whole[0])]
    dropping = words_of(data_path, *DROPOUT, *loading, "--no-load-rng")
    outcomes = [ranks(1, run_pretrain, dropping)[0] for _ in range(2)]
    losses = [outcome.series("loss") for outcome in outcomes]
    assert losses[0] == losses[1] and losses[0][0] != whole[1].series("loss")[LAST]
    plain = [ranks(1, run_pretrain, words_of(data_path, *loading, *more))[0] for more in ([], ["--no-load-rng"])]
    assert plain[0].series("loss") == plain[1].series("loss")
    assert_same_state(plain[1], plain[0])


def test_across_number_formats_and_back(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """float32 to a sharded bfloat16, to float16, to float32: master weights are the weights, bit for bit."""
    formats = {"bf16": ["--bf16", "--use-distributed-optimizer"], "fp16": ["--fp16"], "fp32": []}
    last, surveys = whole[0], [Survey.of(whole[0])]
    for name, more in formats.items():
        words = words_of(data_path, *more, "--load", str(last), "--save", str(tmp_path / name))
        words += ["--override-lr-scheduler", "--train-iters", str(LAST)]
        told = reporting(ranks(2 if name == "bf16" else 1, run_pretrain, words)).messages
        assert any(m.startswith(f"loaded iteration 6 of {last}, saved with ") for m in told)
        last = tmp_path / name
        surveys.append(Survey.of(last))
    first, brain, half, back = surveys
    weights = [name for name in first.tensors if not name.startswith("optimizer.")]
    assert back.tensors.keys() == first.tensors.keys()
    for name in first.tensors:
        assert torch.equal(back.read(name), first.read(name)), name
    for name in weights:
        for survey, dtype in ((brain, torch.bfloat16), (half, torch.float16)):
            assert torch.equal(survey.read(f"optimizer.master_weight.{name}"), first.read(name))
            assert torch.equal(survey.read(name), first.read(name).to(dtype))
            assert torch.equal(survey.read(f"optimizer.exp_avg.{name}"), first.read(f"optimizer.exp_avg.{name}"))
    assert half.state()["optimizer"]["loss_scaler"]["scale"] == 2.0**32  # bfloat16 has none to hand on


def test_master_weights_are_the_weights_where_no_optimizer_is_loaded(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], tmp_path: Path
) -> None:
    words = words_of(data_path, "--bf16", "--load", str(whole[0]), "--no-load-optim", "--override-lr-scheduler")
    ranks(1, run_pretrain, [*words, "--save", str(tmp_path), "--train-iters", str(LAST)])
    saved, source = Survey.of(tmp_path), Survey.of(whole[0])
    for name in (name for name in source.tensors if not name.startswith("optimizer.")):
        assert torch.equal(saved.read(name), source.read(name).bfloat16())
        assert torch.equal(saved.read(f"optimizer.master_weight.{name}"), saved.read(name).float())
        assert not saved.read(f"optimizer.exp_avg.{name}").any()


def test_a_checkpoint_of_weights_alone(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As conversion from another program may leave it."""
    to_native(from_native(whole[0], optimizer=False), tmp_path / "weights", "native")
    words = words_of(data_path, "--load", str(tmp_path / "weights"), train_iters=8, lr_decay_iters=9)
    (told,) = complaints(capsys, words)
    assert re.search("has weights and no state of an optimizer: --finetune begins .*, --no-load-optim goes on", told)
    for flag in ("--finetune", "--no-load-optim"):
        twin = ranks(1, run_pretrain, [*words, "--load", str(whole[0]), flag])[0]
        assert ranks(1, run_pretrain, [*words, flag])[0].series("loss") == twin.series("loss")


def test_a_schedule_that_is_another_one(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = whole
    words = words_of(data_path, "--load", str(folder), train_iters=12, lr=2e-3)
    (told,) = complaints(capsys, words)
    assert told == (
        f"the learning-rate schedule is not that of the checkpoint in {folder}: the largest learning rate is 0.002 and "
        "was 0.001, the end of the decay in samples is 96 and was 72; --override-lr-scheduler goes on by the flags, "
        "--use-checkpoint-lr-scheduler by the checkpoint"
    )
    flagged = ranks(1, run_pretrain, words_of(data_path, train_iters=12, lr=2e-3))[0]
    overridden = ranks(1, run_pretrain, [*words, "--override-lr-scheduler"])[0]
    assert overridden.series("lr") == flagged.series("lr")[LAST:]
    kept = [*words, "--use-checkpoint-lr-scheduler", "--save", str(tmp_path), "--exit-interval", "8"]
    parts = [ranks(1, run_pretrain, kept)[0]]
    # What goes on is the schedule itself, also where the flags beside it were others.
    parts.append(ranks(1, run_pretrain, [*kept, "--load", str(tmp_path), "--exit-interval", "9"])[0])
    assert [lr for part in parts for lr in part.series("lr")] == before.series("lr")[LAST:]
    assert any("goes by the checkpoint's schedule" in message for message in parts[1].messages)


def test_the_same_schedule_in_other_words(ranks: Ranks, data_path: str, whole: tuple[Path, Outcome]) -> None:
    changes = {"lr_warmup_iters": None, "lr_warmup_samples": 8, "lr_decay_samples": 72}
    outcome = ranks(1, run_pretrain, words_of(data_path, "--load", str(whole[0]), **changes))[0]
    assert outcome.series("lr") == whole[1].series("lr")[LAST:]


def test_data_that_was_moved_is_the_same(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], tmp_path: Path
) -> None:
    for ending in (".bin", ".idx"):
        shutil.copy(data_path + ending, tmp_path / f"renamed{ending}")
    words = words_of(str(tmp_path / "renamed"), *DROPOUT, "--load", str(whole[0]))
    outcome = ranks(1, run_pretrain, words)[0]
    assert outcome.series("loss") == whole[1].series("loss")[LAST:]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"split": "60,40,0"}, "--split: of documents the documents 0 to "),
        ({"seq_length": 12}, "--seq-length is 12 and was 16, so samples are cut anew: it goes on at sample 48"),
        ({"seed": 7}, "--seed is 7 and was 1234, so samples are shuffled anew: it goes on at sample 48 (from 0) of"),
        ({"data_path": "other"}, "the training set is other ("),
    ],
)
def test_other_data_needs_a_word(
    ranks: Ranks,
    data_path: str,
    whole: tuple[Path, Outcome],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    sentence: str,
) -> None:
    if "data_path" in changes:
        changes = {"data_path": write_documents(tmp_path / "other", 30)}
    words = words_of(**{"data_path": data_path, "load": whole[0], **changes})
    told = complaints(capsys, words)
    assert sentence in told[0]
    assert told[-1] == (f"the data is not that of the checkpoint in {whole[0]}: --accept-data-change goes on with it")
    outcome = ranks(1, run_pretrain, [*words, "--accept-data-change"])[0]
    assert any(sentence in message for message in outcome.messages)
    assert outcome.series("consumed-samples") == [56, 64, 72]


def test_another_batch_size_goes_on_in_the_same_order(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(
        data_path,
        "--load",
        str(whole[0]),
        global_batch_size=4,
        train_iters=None,
        train_samples=72,
        lr_decay_samples=72,
        lr_warmup_iters=2,
    )
    told = complaints(capsys, words)
    assert told[0].startswith(
        "the batches are --global-batch-size 4 and were --global-batch-size 8: the next one begins"
    )
    outcome = ranks(1, run_pretrain, [*words, "--accept-data-change"])[0]
    assert outcome.series("consumed-samples") == list(range(52, 73, 4))
    assert outcome.series("lr")[0] == whole[1].series("lr")[LAST]


def test_training_for_longer_is_told_and_needs_no_word(
    ranks: Ranks, data_path: str, whole: tuple[Path, Outcome]
) -> None:
    words = words_of(data_path, "--load", str(whole[0]), train_iters=10, lr_decay_iters=9)
    (message,) = [m for m in ranks(1, run_pretrain, words)[0].messages if "is asked for 80 samples and was for 72" in m]
    assert message.endswith("in the same order")
