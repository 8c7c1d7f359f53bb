"""pretrain_bert.py: layouts and micro-batches change no loss, a resumed run is the whole one, mistakes are told."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pretrain_bert
from megatron.model import BertOutput
from megatron.training.arguments import parse_composed
from megatron.training.bert import BertRunConfig
from tests.harness import runs
from tests.harness.bert_runs import flags, run_pretrain_bert, write_sentences
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, assemble, reporting, run_pretrain
from tests.harness.runs import flags as gpt_flags
from tools import build_index

SP, FULL = "--sequence-parallel", ["--recompute-granularity", "full"]
TENSOR, PIPELINE = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
INTERLEAVED = [*PIPELINE, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentences(tmp_path_factory.mktemp("data"))


def same_runs(actual: list[Outcome], expected: list[Outcome], tolerance: float) -> None:
    mine, theirs = reporting(actual), reporting(expected)
    assert len(mine.steps) == len(theirs.steps) > 0
    losses = [name for name in ("loss", "lm-loss", "sop-loss") if name in theirs.steps[0]]
    for name in (*losses, "grad-norm"):
        assert_close(mine.series(name), theirs.series(name), tolerance)
    for name in losses:
        assert_close([e[name] for e in mine.evaluations], [e[name] for e in theirs.evaluations], tolerance)
    if len(losses) > 1:
        assert_close(theirs.series("loss"), np.add(*(theirs.series(name) for name in losses[1:])), 1e-12)


@pytest.mark.parametrize(
    ("world", "layout", "choices"),
    [
        (4, [*TENSOR, *PIPELINE, SP, *FULL], []),
        (4, [*INTERLEAVED, *SHARDED], ["--num-layers", "4", "--norm-position", "post"]),
        (2, [*TENSOR, "--cross-entropy-chunk-size", "20"], ["--apply-residual-connection-post-layernorm"]),
        (2, PIPELINE, ["--bert-no-binary-head", "--untie-embeddings-and-output-weights"]),
        (2, [*TENSOR, SP, "--attention-backend", "unfused"], ["--loss-normalization", "microbatch"]),
    ],
)
def test_layouts_change_nothing(
    ranks: Ranks, data_path: str, world: int, layout: list[str], choices: list[str]
) -> None:
    """Losses, gradient norms, evaluations and final weights in float64 are those of one rank."""
    words = [*flags(data_path, params_dtype="float64", train_iters=6, eval_interval=3), *choices]
    serial = ranks(1, run_pretrain_bert, words)
    outcomes = ranks(world, run_pretrain_bert, [*words, *layout])
    same_runs(outcomes, serial, 1e-9)
    assert_close(assemble(outcomes), assemble(serial), 1e-9, floor=1e-3)


def test_it_learns_and_micro_batches_change_nothing(ranks: Ranks, data_path: str) -> None:
    chosen: dict[str, Any] = {"params_dtype": "float64", "lr": 1e-2, "train_iters": 30}
    one, four = (ranks(1, run_pretrain_bert, flags(data_path, micro_batch_size=b, **chosen)) for b in (1, 4))
    same_runs(four, one, 1e-9)
    assert np.mean(one[0].series("loss")[-5:]) < 0.98 * np.mean(one[0].series("loss")[:5])


@pytest.mark.parametrize(("world", "layout"), [(1, []), (4, [*TENSOR, *PIPELINE, SP])])
def test_resumed_equals_uninterrupted(
    ranks: Ranks, data_path: str, tmp_path: Path, world: int, layout: list[str]
) -> None:
    words = [*flags(data_path, train_iters=6, eval_iters=0, attention_dropout=0.1, hidden_dropout=0.1), *layout]
    saving = [*words, "--save", str(tmp_path)]
    whole = ranks(world, run_pretrain_bert, words)
    ranks(world, run_pretrain_bert, [*saving, "--exit-interval", "3"])
    resumed = ranks(world, run_pretrain_bert, [*saving, "--load", str(tmp_path)])
    assert reporting(resumed).series("loss") == reporting(whole).series("loss")[3:]
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine.local.keys() == theirs.local.keys()
        for name, values in theirs.local.items():
            np.testing.assert_array_equal(mine.local[name], values, err_msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_follow_the_float32_run(ranks: Ranks, data_path: str, precision: str) -> None:
    scale = {"initial_loss_scale": 2.0**12} if precision == "fp16" else {}
    chosen: dict[str, Any] = {"train_iters": 6, "eval_iters": 0}
    (expected,) = ranks(1, run_pretrain_bert, flags(data_path, **chosen))
    low = flags(data_path, **chosen, **scale, **{precision: True})
    actual = reporting(ranks(2, run_pretrain_bert, [*low, *TENSOR, SP]))
    assert actual.series("loss") != expected.series("loss")
    assert_close(actual.series("loss"), expected.series("loss"), 5e-3)
    assert_close(actual.series("grad-norm"), expected.series("grad-norm"), 5e-2)


def test_losses_of_a_micro_batch() -> None:
    """Against means written out sample by sample."""
    generator = torch.Generator().manual_seed(0)
    lm, binary = torch.rand(3, 5, generator=generator).double(), torch.randn(3, 2, generator=generator).double()
    mask = torch.tensor([[1.0, 0, 1, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 1]])
    batch = {"loss_mask": mask, "is_random": torch.tensor([0, 1, 1])}
    orders = [F.cross_entropy(binary[i : i + 1], batch["is_random"][i : i + 1]).item() for i in range(3)]
    masked = [float(lm[i][mask[i] == 1].sum()) for i in range(3)]
    weighted = sum(masked) + 2 * orders[0] + 4 * orders[1] + 1 * orders[2]
    total, count, parts = pretrain_bert.losses(BertOutput(lm, binary), batch, "tokens")
    assert [part.item() for part in parts] == pytest.approx([sum(masked), weighted - sum(masked)])
    assert (total.item(), count.item()) == (pytest.approx(weighted), 7)
    total, count, parts = pretrain_bert.losses(BertOutput(lm, binary), batch, "microbatch")
    assert [part.item() / count.item() for part in parts] == pytest.approx([sum(masked) / 7, sum(orders) / 3])
    assert total.item() / count.item() == pytest.approx(sum(masked) / 7 + sum(orders) / 3)
    total, count, parts = pretrain_bert.losses(BertOutput(lm, None), batch, "tokens")
    assert parts == ()
    assert (total.item(), count.item()) == (pytest.approx(sum(masked)), 7)


def test_maps_made_beforehand_are_found_by_a_rank_that_makes_none(
    ranks: Ranks, data_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {"train_iters": 2, "data_cache_path": tmp_path / "cache", "data_cache_timeout_minutes": 0}
    words = flags(data_path, **chosen)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="did not appear within 0 seconds"):
        pretrain_bert.train(parse_composed(BertRunConfig, words, world_size=1))
    build_index.main(["--bert", "--world-size", "2", *words])
    assert "train: 16 samples from" in capsys.readouterr().out
    pretrain_bert.train(parse_composed(BertRunConfig, words, world_size=1))


complaints = functools.partial(runs.complaints, main=pretrain_bert.main)


def test_mistakes_are_told(ranks: Ranks, capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path) -> None:
    for changes, sentence in (
        ({"mask_prob": 0}, "--mask-prob 0.0: it must be above 0"),
        ({"reset_attention_mask": True}, "--reset-attention-mask is a flag of pretrain_gpt.py, not of this"),
        ({"seq_length": 4}, "--seq-length 4: a sample for BERT takes at least 5"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 90}, "NullTokenizer --vocab-size 90: no classification to"),
        ({"norm_position": "post", "apply_residual_connection_post_layernorm": True}, "it needs --norm-position pre"),
    ):
        (told,) = complaints(capsys, flags(data_path, **changes))
        assert sentence in told
    gpt = gpt_flags(data_path, train_iters=2, eval_iters=0, vocab_size=90, save=tmp_path / "gpt")
    ranks(1, run_pretrain, gpt)
    bert = flags(data_path, train_iters=2, eval_iters=0, save=tmp_path / "bert")
    ranks(1, run_pretrain_bert, bert)
    (told,) = complaints(capsys, flags(data_path, load=tmp_path / "gpt"))
    assert told == f"--load {tmp_path / 'gpt'}: its checkpoint is of gpt, this run trains bert"
    told_of = complaints(capsys, flags(data_path, load=tmp_path / "bert", short_seq_prob=0.25))
    assert any("--short-seq-prob is 0.25 and was 0.5, so samples are made anew" in told for told in told_of)
    told_of = complaints(capsys, flags(data_path, load=tmp_path / "bert", bert_no_binary_head=True))
    assert told_of == [f"--bert-no-binary-head True: the model of the checkpoint in {tmp_path / 'bert'} has False"]
