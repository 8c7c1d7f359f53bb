"""Runs over blends, divided documents, growing batches and indices that were made beforehand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_gpt
from megatron.data import IndexedWriter
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.run import sample_counts
from tests.harness.closeness import assert_close
from tests.harness.launch import run_command
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, flags, run_pretrain, write_documents


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    return [write_documents(folder / f"set{k}", seed=k) for k in range(2)]


def blend_flags(sets: list[str], **changes: Any) -> list[str]:
    return [*flags(sets[0], **changes), "--data-path", "0.7", sets[0], "0.3", sets[1]]


def test_a_blend_at_any_layout_prints_its_report(
    ranks: Ranks, sets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = blend_flags(sets, train_iters=4, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    serial = ranks(1, run_pretrain, words)[0]
    for tensor, data in ((2, 1), (1, 2)):
        other = ranks(tensor * data, run_pretrain, [*words, "--tensor-model-parallel-size", str(tensor)])[0]
        assert_close(other.series("loss"), serial.series("loss"), 1e-5)
    plain = ranks(1, run_pretrain, blend_flags(sets, train_iters=4, eod_mask_loss=True))[0]
    assert plain.series("loss") != serial.series("loss")
    pretrain_gpt.main(words)
    printed = capsys.readouterr().out
    assert "train: 32 samples from 2 token sets; at any time each set is at most" in printed
    assert f"  {sets[0]}: 22 samples, 68.7500% for the asked 70.0000%" in printed


def test_ids_of_every_set_are_checked(sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "high", np.uint16) as writer:
        for _ in range(40):
            writer.add_document([*range(1, 30), 150])
    with pytest.raises(SystemExit):
        pretrain_gpt.main([*flags(sets[0]), "--data-path", "1", sets[0], "1", str(tmp_path / "high")])
    assert "the data holds the token id 150, but the vocabulary has only 100" in capsys.readouterr().err


def run_ramp(ranks: Ranks, data: int, path: str, **changes: Any) -> Outcome:
    words = flags(path, train_iters=12, attention_dropout=0, **changes)
    return ranks(data, run_pretrain, [*words, "--rampup-batch-size", "4", "4", "24"])[0]


def test_batches_grow_and_a_resumed_run_goes_on(ranks: Ranks, sets: list[str], tmp_path: Path) -> None:
    """Batches of 4 for 24 samples, then of 8; the same losses on two replicas and after a stop in the ramp."""
    whole = run_ramp(ranks, 1, sets[0])
    consumed = np.diff([0.0, *whole.series("consumed-samples")]).tolist()
    assert consumed == [4.0] * 6 + [8.0] * 6
    assert_close(run_ramp(ranks, 2, sets[0]).series("loss"), whole.series("loss"), 1e-5)
    saved = {"save": tmp_path / "saved"}
    for stop in (4, 8, None):
        loaded = {} if stop == 4 else {"load": tmp_path / "saved"}
        part = run_ramp(ranks, 1, sets[0], exit_interval=stop, **saved, **loaded)
        last = stop or 12
        assert part.series("loss") == whole.series("loss")[last - 4 : last]
        assert part.series("lr") == whole.series("lr")[last - 4 : last]


def test_a_run_of_so_many_samples(ranks: Ranks, sets: list[str], tmp_path: Path) -> None:
    """As one of so many iterations, over a stop and a batch size that changes there."""
    told = {"train_iters": None, "lr_warmup_iters": None, "lr_warmup_samples": 16, "lr_decay_samples": 64}
    iterations = ranks(1, run_pretrain, flags(sets[0], train_iters=8))[0]
    words = flags(sets[0], train_samples=67, **told)
    whole = ranks(1, run_pretrain, [*words, "--train-samples", "64"])[0]
    for name in ("loss", "lr", "consumed-samples"):
        assert whole.series(name) == iterations.series(name)
    saved = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    ranks(1, run_pretrain, [*words, *saved, "--exit-interval", "3"])
    resumed = ranks(1, run_pretrain, [*words, *saved, "--global-batch-size", "4", "--accept-data-change"])[0]
    assert resumed.series("consumed-samples") == [*range(28, 68, 4)]
    assert resumed.series("lr")[0] == iterations.series("lr")[3]


def test_mistakes_of_the_ramp_up_are_told(sets: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["2", "2"], "--rampup-batch-size 2 2: it takes three numbers"),
        (["2", "4", "16"], "increments of 4 must lead from 2 to 8"),
        (["1", "1", "16"], "start and increment must be multiples of the micro batch"),
        (["a", "1", "16"], "--rampup-batch-size a: it must be a whole number"),
    ):
        with pytest.raises(SystemExit):
            pretrain_gpt.main([*flags(sets[0]), "--rampup-batch-size", *words])
        told = capsys.readouterr().err
        assert sentence in told
        assert told.count("error: ") == 1


def test_samples_of_a_ramp_up_are_counted() -> None:
    words = [*flags("x", train_iters=12), "--rampup-batch-size", "4", "4", "24"]
    config = parse_composed(RunConfig, words, world_size=1, check_inputs=False)
    assert sample_counts(config, 1) == (6 * 4 + 6 * 8, 16, 16)


def built(words: list[str]) -> "subprocess.CompletedProcess[str]":
    return run_command([sys.executable, "tools/build_index.py", *words])


def test_indices_made_beforehand_are_found_by_ranks_that_build_none(
    ranks: Ranks, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    apart = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
    words = blend_flags(sets, train_iters=3, data_cache_path=cache, data_cache_timeout_minutes=0, **apart)
    monkeypatch.setenv("LOCAL_RANK", "1")  # a rank that waits, here for nothing
    with pytest.raises(ValueError, match="did not appear within 0 seconds"):
        run_once(words)
    monkeypatch.delenv("LOCAL_RANK")
    done = built([*words, "--world-size", "4"])
    assert done.returncode == 0, done.stderr
    assert "train: 24 samples from 2 token sets" in done.stdout
    files = {p.name: p.stat().st_mtime_ns for p in cache.iterdir()}
    descriptions = [json.loads(p.read_text())["determined_by"]["kind"] for p in cache.glob("*.json")]
    assert sorted(descriptions) == ["blend"] * 2 + ["gpt"] * 4
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_once(words)
    assert {p.name: p.stat().st_mtime_ns for p in cache.iterdir()} == files


def run_once(words: list[str]) -> None:
    pretrain_gpt.train(parse_composed(RunConfig, words, world_size=1))


def test_mistakes_are_told_by_build_index_too(tmp_path: Path) -> None:
    done = built(flags(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --data-path {tmp_path / 'nothing'}: ")
