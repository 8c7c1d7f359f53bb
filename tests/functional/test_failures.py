"""A rank that fails ends the whole run, with its message and in seconds; a mistake is told once for all ranks."""

from pathlib import Path

import pytest

from tests.harness.launch import torchrun
from tests.harness.runs import flags, write_documents


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"tensor_model_parallel_size": 2}),
        (2, {}),
        (3, {"pipeline_model_parallel_size": 3, "num_layers": 3}),  # the stage in the middle
    ],
)
def test_a_rank_that_raises_ends_the_others_with_its_message(
    data_path: str, tmp_path: Path, ranks: int, layout: dict[str, int]
) -> None:
    words = flags(data_path, save=tmp_path / "saved", **layout)
    done = torchrun(ranks, ["tests/functional/failing_run.py", "raise", *words], timeout=120)
    assert done.returncode != 0
    for rank in {*range(ranks)} - {1}:
        assert f"rank {rank} stops because of rank 1: RuntimeError: the third batch is cursed" in done.stderr
    assert done.stderr.count("RuntimeError: the third batch is cursed\n") >= 1  # the failing rank's own traceback
    assert list((tmp_path / "saved").iterdir()) == []  # made to see that it can be written, and no checkpoint in it


def test_a_rank_that_is_killed_ends_the_others(data_path: str) -> None:
    words = flags(data_path, tensor_model_parallel_size=2)
    done = torchrun(2, ["tests/functional/failing_run.py", "kill", *words], timeout=120)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"global_batch_size": 6},
            "error: --global-batch-size 6: it must be a multiple of --micro-batch-size 2",
        ),
        ({"tensor_model_parallel_size": 2, "vocab_size": 50}, "but the vocabulary has only 50 ids"),
    ],
)
def test_a_mistake_is_told_once(data_path: str, changes: dict[str, int], sentence: str) -> None:
    done = torchrun(2, ["pretrain_gpt.py", *flags(data_path, **changes)], timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert sentence in done.stderr
    assert 'File "' + str(Path.cwd()) + "/megatron" not in done.stderr
    assert "exitcode  : 2" in done.stderr
