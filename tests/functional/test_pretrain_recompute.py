"""Runs that recompute activations, asked for by new flags and old: bit for bit the run that keeps them."""

import numpy as np
import pytest

from tests.harness.ranks import Ranks
from tests.harness.runs import flags, run_pretrain, write_documents

FULL = ["--recompute-granularity", "full"]
SP = ["--sequence-parallel"]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.mark.parametrize(
    ("tensor", "shared", "choices"),
    [
        (1, ["--params-dtype", "float64"], [FULL, ["--recompute-granularity", "selective"]]),
        (
            2,
            [],
            [
                ["--checkpoint-activations", "--checkpoint-num-layers", "2"],
                [*FULL, "--distribute-saved-activations"],
                ["--checkpoint-activations", "--distribute-checkpointed-activations"],
            ],
        ),
        (
            2,
            SP,
            [
                [*FULL, "--recompute-method", "block", "--recompute-num-layers", "1"],
                ["--recompute-granularity", "selective", "--overlap-grad-reduce"],
            ],
        ),
        (1, ["--attention-backend", "unfused", "--bf16"], [FULL, ["--recompute-granularity", "selective"]]),
    ],
)
def test_a_run_that_recomputes_is_bit_equal(
    ranks: Ranks, data_path: str, tensor: int, shared: list[str], choices: list[list[str]]
) -> None:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    line = flags(data_path, tensor_model_parallel_size=tensor, train_iters=4, eval_iters=0, **dropout)
    kept = ranks(tensor, run_pretrain, [*line, *shared])
    without = ranks(tensor, run_pretrain, [*line, *shared, "--hidden-dropout", "0"])
    assert without[0].series("loss") != kept[0].series("loss")
    for words in choices:
        again = ranks(tensor, run_pretrain, [*line, *shared, *words])
        for rank in range(tensor):
            assert again[rank].series("loss") == kept[rank].series("loss"), words
            for name, values in kept[rank].local.items():
                np.testing.assert_array_equal(again[rank].local[name], values, err_msg=f"{name} with {words}")
            for name, state in kept[rank].rng.items():
                np.testing.assert_array_equal(again[rank].rng[name], state, err_msg=f"{name} with {words}")
