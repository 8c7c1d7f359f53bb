"""The saves of whole runs: behind training as before it, on disks that are full for a while, and how many are kept."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import pretrain_gpt
from megatron.checkpointing import save
from tests.functional.test_pretrain_resume import SHARDED, assert_bit_equal
from tests.harness.faults import run_with_full_disk
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, flags, reporting, run_pretrain, write_documents

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def folders(directory: Path) -> list[int]:
    """The iterations of the checkpoints in `directory`, in which there is nothing else but the tracker of the last."""
    numbers = [int(path.name.removeprefix("iter_")) for path in sorted(directory.glob("iter_*"))]
    assert len(list(directory.iterdir())) == len(numbers) + 1
    assert (directory / TRACKER).read_text() == f"{numbers[-1]}\n"
    return numbers


PASSES = 2  # micro-batches of one rank in one iteration


def run_with_slow_disk(rank: int, world_size: int, words: Sequence[str]) -> Outcome:
    """As `run_pretrain`; a save behind training is held back until the run has begun its second iteration after it."""
    forward_step, write = pretrain_gpt.forward_step, save.write_pieces
    passes, behind = [0], []

    def counted(*arguments: Any) -> Any:
        passes[0] += 1
        return forward_step(*arguments)

    def slow(path: Path, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            behind.append(int("".join(filter(str.isdigit, path.parent.name))))
            while passes[0] <= PASSES * (behind[-1] + 1):
                time.sleep(0.001)
        return write(path, *arguments)

    with mock.patch.object(pretrain_gpt, "forward_step", counted), mock.patch.object(save, "write_pieces", slow):
        outcome = run_pretrain(rank, world_size, words)
    assert behind == ([3, 6] if "--async-save" in words else [])
    return outcome


def test_saves_behind_training_are_those_before_it(ranks: Ranks, data_path: str, tmp_path: Path) -> None:
    """Bit for bit, though weights and generators have moved on before they are written, as has the run."""
    chosen = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "train_iters": 8, "eval_iters": 0, "save_interval": 3}
    words = [*flags(data_path, **chosen), *SHARDED, "--bf16"]
    runs, places = [], [tmp_path / name for name in ("before", "behind")]
    for place, more in zip(places, ([], ["--async-save"]), strict=True):
        runs.append(ranks(2, run_with_slow_disk, [*words, *more, "--save", str(place)]))
        assert folders(place) == [3, 6, 8]
    assert reporting(runs[0]).series("loss") == reporting(runs[1]).series("loss")
    for before, behind in zip(*runs, strict=True):
        assert_bit_equal(behind, before)
    files = [{p.relative_to(place): p.read_bytes() for p in place.rglob("*.safetensors")} for place in places]
    assert files[0] == files[1] and len(files[0]) == 3 * 2
    told = [message.split(" to ")[0] for message in reporting(runs[1]).messages if "iteration" in message]
    assert told == [
        *("iteration 3 is being written", "iteration 3 is saved now,"),
        *("iteration 6 is being written", "iteration 6 is saved now,", "saved iteration 8"),
    ]


@pytest.mark.parametrize("more", [[], ["--async-save"]])
def test_a_failed_save_is_told_and_the_next_one_works(
    ranks: Ranks, data_path: str, tmp_path: Path, more: list[str]
) -> None:
    """Saves after iterations 2 and 4 fail, 6 does not, 8 does; the last two stay."""
    words = flags(data_path, train_iters=9, eval_iters=0)
    saving = [*words, "--save", str(tmp_path), "--save-interval", "2", "--keep-last", "2", *more]
    plain = ranks(2, run_pretrain, words)
    results = ranks(2, run_with_full_disk, saving, (0, 1, 3))
    outcomes = [outcome for outcome, _ in results]
    assert reporting(outcomes).series("loss") == reporting(plain).series("loss")
    failures = [message for message in reporting(outcomes).messages if "could not be saved" in message]
    cause = "rank 1: OSError: [Errno 28] No space left on device"
    assert failures == [
        f"iteration {iteration} could not be saved ({count} in a row of --max-failed-saves 3): {cause}"
        for iteration, count in ((2, 1), (4, 2), (8, 1))
    ]
    assert folders(tmp_path) == [6, 9]


@pytest.mark.parametrize("more", [[], ["--async-save"]])
def test_saves_that_keep_failing_end_the_run(ranks: Ranks, data_path: str, tmp_path: Path, more: list[str]) -> None:
    """On all ranks alike; what was saved before goes on, and the end of a run is not saved twice."""
    words = flags(data_path, train_iters=8, eval_iters=0)
    saving = [*words, "--save", str(tmp_path), "--save-interval", "2", "--max-failed-saves", "2", *more]
    plain = ranks(2, run_pretrain, words)
    for outcome, failure in ranks(2, run_with_full_disk, saving, (1, 2, 3)):
        assert outcome is None
        assert failure.startswith(
            "iteration 6 could not be saved (2 in a row of --max-failed-saves 2): rank 1: OSError"
        )
    assert folders(tmp_path) == [2]
    resumed = ranks(2, run_pretrain, [*saving, "--load", str(tmp_path)])
    assert reporting(resumed).series("loss") == reporting(plain).series("loss")[2:]
    times = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    again = ranks(2, run_pretrain, [*saving, "--load", str(tmp_path)])
    assert reporting(again).steps == []
    assert [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == times


def test_a_run_that_cannot_save_ends_with_1_and_a_sentence(
    data_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    words = flags(data_path, train_iters=4, eval_iters=0, save=tmp_path / "saved", save_interval=1)
    for limit, iteration in ((3, 3), (9, None)):
        with mock.patch.object(save, "write_pieces", full), pytest.raises(SystemExit) as caught:
            pretrain_gpt.main([*words, "--max-failed-saves", str(limit)])
        assert caught.value.code == 1
        count = f"iteration {iteration} could not be saved ({limit} in a row of --max-failed-saves {limit})"
        # The last save of a run is one that must not fail.
        last = f"iteration 4, the last of this run, could not be saved to {tmp_path / 'saved'}"
        said = f"error: {count if iteration else last}: OSError: [Errno 28] No space left on device\n"
        assert capsys.readouterr().err == said
    assert list((tmp_path / "saved").iterdir()) == []
