"""A run that stops and resumes is the uninterrupted run, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, flags, run_pretrain, write_documents


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def assert_bit_equal(actual: Outcome, expected: Outcome) -> None:
    """Weights, optimizer state and generators, all of them and of the same names."""
    for mine, theirs in ((actual.local, expected.local), (actual.rng, expected.rng)):
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_array_equal(mine[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("tensor", "data", "dropout", "workers"), [(1, 1, 0.1, 0), (2, 1, 0.1, 2), (1, 2, 0.1, 0), (2, 1, 0.0, 0)]
)
def test_resumed_equals_uninterrupted(
    ranks: Ranks, data_path: str, tmp_path: Path, tensor: int, data: int, dropout: float, workers: int
) -> None:
    chosen = {"attention_dropout": dropout, "hidden_dropout": dropout, "num_workers": workers}
    words = flags(data_path, tensor_model_parallel_size=tensor, save=tmp_path / "checkpoints", **chosen)
    whole = ranks(tensor * data, run_pretrain, flags(data_path, tensor_model_parallel_size=tensor, **chosen))
    stopped = ranks(tensor * data, run_pretrain, [*words, "--exit-interval", "10"])
    resumed = ranks(tensor * data, run_pretrain, [*words, "--load", str(tmp_path / "checkpoints")])
    assert [step["iteration"] for step in stopped[0].steps] == list(range(1, 11))
    assert [step["iteration"] for step in resumed[0].steps] == list(range(11, 21))
    assert stopped[0].series("loss") + resumed[0].series("loss") == whole[0].series("loss")
    assert stopped[0].series("grad-norm") + resumed[0].series("grad-norm") == whole[0].series("grad-norm")
    assert resumed[0].evaluations == whole[0].evaluations[-1:]
    for rank in range(tensor * data):
        assert_bit_equal(resumed[rank], whole[rank])


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


def test_a_loaded_run_saves_to_another_folder_and_tells_what_changed(
    ranks: Ranks, data_path: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    chosen = {"train_iters": 4, "eval_iters": 0}
    ranks(1, run_pretrain, flags(data_path, save=first, **chosen))
    ranks(1, run_pretrain, flags(data_path, load=first, save=second, **chosen))
    assert (second / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    told = ranks(1, run_pretrain, flags(data_path, load=first, lr=2e-3, seed=7, **chosen))[0].messages
    assert "the learning-rate schedule is not the checkpoint's: --lr is 0.002 and was 0.001" in told
    assert "the order of the samples is not the checkpoint's: --seed is 7 and was 1234" in told
