"""Runs that leave before their end: at SIGTERM on any rank and after a time, saved, and the same when they go on."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import pretrain_gpt
from megatron.training import leaving
from tests.functional.test_pretrain_resume import assert_bit_equal
from tests.harness.launch import REPOSITORY, environment
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, flags, reporting, run_pretrain, write_documents

TRACKER = "latest_checkpointed_iteration.txt"
# Passes of one rank in one iteration, where there are two replicas.
PASSES = 2


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def run_with_signal(rank: int, world_size: int, words: Sequence[str], at: int) -> Outcome:
    """As `run_pretrain`; the last rank gets SIGTERM in its pass `at` (from 0). The handler is put back."""
    forward_step, passes, before = pretrain_gpt.forward_step, iter(range(10**6)), signal.getsignal(signal.SIGTERM)

    def signalled(*arguments: Any) -> Any:
        if next(passes) == at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_step(*arguments)

    with mock.patch.object(pretrain_gpt, "forward_step", signalled):
        outcome = run_pretrain(rank, world_size, words)
    assert signal.getsignal(signal.SIGTERM) == before
    return outcome


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_signal_to_one_rank_saves_and_ends_all_at_that_iteration(
    ranks: Ranks, data_path: str, tmp_path: Path, pipeline: int
) -> None:
    """The run that goes on is the uninterrupted one. The evaluation that was due is left out."""
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    words = flags(data_path, train_iters=6, eval_interval=3, pipeline_model_parallel_size=pipeline, **dropout)
    saving = [*words, "--save", str(tmp_path)]
    per_iteration = PASSES * pipeline  # a stage runs the micro-batches of all replicas that it replaces
    whole = ranks(2, run_pretrain, words)
    left = ranks(2, run_with_signal, saving, 2 * per_iteration)
    assert (tmp_path / TRACKER).read_text() == "3\n"
    assert reporting(left).series("iteration") == [1, 2, 3]
    assert reporting(left).evaluations == []
    assert reporting(left).messages[-1] == (
        f"the run ends after iteration 3, because SIGTERM came; --load {tmp_path} goes on from here"
    )
    resumed = ranks(2, run_pretrain, [*saving, "--load", str(tmp_path)])
    assert reporting(left).series("loss") + reporting(resumed).series("loss") == reporting(whole).series("loss")
    for rank in range(2):
        assert_bit_equal(resumed[rank], whole[rank])


def run_on_other_clocks(rank: int, world_size: int, words: Sequence[str], seconds: Sequence[float]) -> Outcome:
    """As `run_pretrain`, where after each look at the clock this rank's `seconds` have passed."""
    moments = iter([seconds[rank] * number for number in range(1, 1000)])
    own_clock = functools.partial(leaving.Leaving, clock=lambda: next(moments))
    with mock.patch.object(leaving, "Leaving", lambda *args, began, **named: own_clock(*args, began=0.0, **named)):
        return run_pretrain(rank, world_size, words)


def test_after_a_time_by_the_first_ranks_clock(ranks: Ranks, data_path: str) -> None:
    words = flags(data_path, train_iters=6, eval_iters=0, exit_duration_in_mins=2)
    for seconds, iterations in (((30.0, 1e9), 4), ((0.0, 1e9), 6)):
        outcomes = ranks(2, run_on_other_clocks, words, seconds)
        assert [len(outcome.steps) for outcome in outcomes] == [iterations, 0]
    told = ranks(2, run_pretrain, [*words, "--exit-duration-in-mins", "0"])[0]
    assert told.series("iteration") == [1]
    assert told.messages[-1].endswith("-in-mins 0 are over; nothing is saved, for there is no --save")


@pytest.mark.slow
def test_torchrun_passes_a_signal_on(data_path: str, tmp_path: Path) -> None:
    """It sends it to the process groups of the ranks, whose loaders go on; the ranks end with 0, it does not."""
    words = flags(data_path, save=tmp_path / "saved", train_iters=10**6, num_workers=2, tensor_model_parallel_size=2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "tests/functional/ending_run.py", str(tmp_path), *words, "--eval-iters", "0"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment(), **streams) as run:
        try:
            assert run.stdout is not None
            assert any(line.startswith("iteration 5 ") for line in run.stdout)
            run.send_signal(signal.SIGTERM)
            out, error = run.communicate(timeout=120)
        finally:
            run.kill()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["0", "0"], error
    iteration = int((tmp_path / "saved" / TRACKER).read_text())
    assert f"the run ends after iteration {iteration}, because SIGTERM came" in out
    assert run.returncode != 0 and "SignalException" in error
