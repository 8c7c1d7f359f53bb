"""A run that stops and resumes is the uninterrupted run, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, assemble, flags, reporting, run_pretrain, write_documents


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def assert_bit_equal(actual: Outcome, expected: Outcome) -> None:
    """Weights, optimizer state and generators, all of them and of the same names."""
    for mine, theirs in ((actual.local, expected.local), (actual.rng, expected.rng)):
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_array_equal(mine[name], values, err_msg=name)
    assert actual.progress["optimizer"] == expected.progress["optimizer"]


SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
# Two stages on each of two ranks.
INTERLEAVED = ["--pipeline-model-parallel-size", "2", "--num-layers", "4"]
INTERLEAVED += ["--num-layers-per-virtual-pipeline-stage", "1"]
# A scale that the first gradients overflow; it is sought, and grows again, before and after the stop.
SEEKING = ["--fp16", "--initial-loss-scale", str(2.0**22), "--loss-scale-window", "3"]


@pytest.mark.parametrize(
    ("tensor", "world", "dropout", "workers", "more"),
    [
        (1, 1, 0.1, 2, []),
        (2, 2, 0.1, 0, []),
        (1, 2, 0.1, 0, []),
        (2, 2, 0.0, 0, []),
        (1, 2, 0.0, 0, SEEKING),
        (1, 2, 0.1, 0, ["--bf16", *SHARDED]),
        (2, 4, 0.1, 0, ["--sequence-parallel", *SHARDED, "--optimizer", "sgd"]),
        (1, 2, 0.1, 0, INTERLEAVED),
        (2, 4, 0.1, 0, [*INTERLEAVED, "--sequence-parallel", "--bf16"]),
    ],
)
def test_resumed_equals_uninterrupted(
    ranks: Ranks, data_path: str, tmp_path: Path, tensor: int, world: int, dropout: float, workers: int, more: list[str]
) -> None:
    chosen = {"attention_dropout": dropout, "hidden_dropout": dropout, "num_workers": workers}
    if "--fp16" in more:  # slow on a CPU
        chosen |= {"hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    words = [*flags(data_path, tensor_model_parallel_size=tensor, **chosen), *more]
    saving = [*words, "--save", str(tmp_path / "checkpoints")]
    whole = ranks(world, run_pretrain, words)
    stopped = ranks(world, run_pretrain, [*saving, "--exit-interval", "10"])
    resumed = ranks(world, run_pretrain, [*saving, "--load", str(tmp_path / "checkpoints")])
    assert reporting(stopped).series("iteration") == list(range(1, 11))
    assert reporting(resumed).series("iteration") == list(range(11, 21))
    for name in ("loss", "grad-norm", "lr", "loss-scale", "skipped-iterations"):
        parts = [[step.get(name) for step in reporting(run).steps] for run in (stopped, resumed, whole)]
        assert parts[0] + parts[1] == parts[2]
    assert reporting(resumed).evaluations == reporting(whole).evaluations[-1:]
    for rank in range(world):
        assert_bit_equal(resumed[rank], whole[rank])
    if more == SEEKING:
        scales = whole[0].series("loss-scale")
        assert 0 < stopped[0].progress["run"]["skipped_iterations"] < whole[0].progress["run"]["skipped_iterations"]
        assert min(scales) < 2.0**22 / 4


def test_a_sharded_run_goes_on_at_another_layout(ranks: Ranks, data_path: str, tmp_path: Path) -> None:
    """From TP 2 and two shards to one rank with the plain optimizer, and back: the losses of the serial run."""
    words = flags(data_path, params_dtype="float64", eval_iters=0, train_iters=9, ddp_bucket_size=3000)
    saved = ["--save", str(tmp_path / "checkpoints")]
    sharded = ["--tensor-model-parallel-size", "2", "--sequence-parallel", *SHARDED]
    serial = ranks(1, run_pretrain, words)
    parts = [ranks(4, run_pretrain, [*words, *saved, *sharded, "--exit-interval", "3"])]
    loading = [*words, *saved, "--load", saved[1]]
    parts.append(ranks(1, run_pretrain, [*loading, "--exit-interval", "6"]))
    parts.append(ranks(4, run_pretrain, [*loading, *sharded]))
    losses = [loss for part in parts for loss in part[0].series("loss")]
    assert_close(losses, serial[0].series("loss"), 1e-9)
    assert_close(assemble(parts[-1]), assemble(serial), 1e-9, floor=1e-3)


@pytest.mark.parametrize("untied", [False, True])
def test_a_pipeline_goes_on_at_another_layout(ranks: Ranks, data_path: str, tmp_path: Path, untied: bool) -> None:
    """From virtual stages to one rank, to TP 2 with other stages, and back: the losses of the serial run."""
    chosen = {"params_dtype": "float64", "eval_iters": 0, "train_iters": 12, "num_layers": 4}
    words = flags(data_path, **chosen, untie_embeddings_and_output_weights=True if untied else None)
    saved = ["--save", str(tmp_path / "checkpoints")]
    loading = [*words, *saved, "--load", saved[1]]
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    serial = ranks(1, run_pretrain, words)
    parts = [ranks(2, run_pretrain, [*words, *saved, *INTERLEAVED, "--exit-interval", "3"])]
    parts.append(ranks(1, run_pretrain, [*loading, "--exit-interval", "6"]))
    parts.append(ranks(4, run_pretrain, [*loading, *sizes, "--use-distributed-optimizer", "--exit-interval", "9"]))
    parts.append(ranks(2, run_pretrain, [*loading, *INTERLEAVED]))
    losses = [loss for part in parts for loss in reporting(part).series("loss")]
    assert_close(losses, serial[0].series("loss"), 1e-9)
    assert_close(assemble(parts[-1]), assemble(serial), 1e-9, floor=1e-3)
    layouts = "tensor 1, pipeline 1, data 1", "tensor 2, pipeline 2, data 1"
    for words_on_layout, part in zip(("tensor 1, pipeline 2, virtual 2, data 1", *layouts), parts[1:], strict=True):
        assert any(words_on_layout in message for message in reporting(part).messages)


def test_saving_on_the_way_changes_nothing(ranks: Ranks, data_path: str, tmp_path: Path) -> None:
    chosen = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "train_iters": 8}
    plain = ranks(1, run_pretrain, flags(data_path, **chosen))
    saving = ranks(1, run_pretrain, flags(data_path, save=tmp_path / "saved", save_interval=3, **chosen))
    assert_bit_equal(saving[0], plain[0])
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "iter_0000003",
        "iter_0000006",
        "iter_0000008",
        "latest_checkpointed_iteration.txt",
    ]


def test_evaluating_on_the_way_changes_nothing(ranks: Ranks, data_path: str) -> None:
    chosen = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "train_iters": 6}
    plain = ranks(2, run_pretrain, flags(data_path, tensor_model_parallel_size=2, eval_iters=0, **chosen))
    words = flags(data_path, tensor_model_parallel_size=2, eval_interval=2, eval_at_start=True, **chosen)
    evaluating = ranks(2, run_pretrain, words)
    assert [e["iteration"] for e in evaluating[0].evaluations] == [0, 2, 4, 6]
    for rank in range(2):
        assert_bit_equal(evaluating[rank], plain[rank])


def test_evaluation_leaves_out_dropout(ranks: Ranks, data_path: str) -> None:
    words = flags(data_path, train_iters=0, lr_warmup_iters=0)
    plain = ranks(1, run_pretrain, words)[0].evaluations
    dropping = ranks(1, run_pretrain, [*words, "--hidden-dropout", "0.5", "--attention-dropout", "0.5"])[0].evaluations
    assert len(plain) == 1
    assert plain == dropping


def test_a_loaded_run_saves_to_another_folder(ranks: Ranks, data_path: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    chosen = {"train_iters": 4, "eval_iters": 0}
    ranks(1, run_pretrain, flags(data_path, save=first, **chosen))
    moved = ranks(1, run_pretrain, flags(data_path, load=first, save=second, **chosen))
    tracker = second / "latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() == "4"
    # Another run into the same folder, by mistake or not, says whose place it will take.
    again = ranks(1, run_pretrain, flags(data_path, save=second, exit_interval=2, **chosen))
    words = f"--save {second}: it has checkpoints that this run does not go on from, of the iterations 4;"
    assert [any(told.startswith(words) for told in run[0].messages) for run in (moved, again)] == [False, True]
    left = f"the run ends after iteration 2, because --exit-interval 2 asks for it; --load {second} goes on from here"
    assert again[0].messages[-1] == left
    assert tracker.read_text().strip() == "2" and (second / "iter_0000004").is_dir()
