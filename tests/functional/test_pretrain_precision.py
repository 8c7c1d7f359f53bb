"""Runs in FP16 and BF16: they follow the run in FP32, skip what overflows on any rank, and stop at a loss of NaN."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_gpt
from megatron.training import run as run_room
from tests.harness.closeness import assert_close
from tests.harness.faults import Fault, failure_with_fault, run_with_fault
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, flags, reporting, run_pretrain, write_documents

# Products of float16 are some hundred times slower than those of float32 on a CPU.
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "micro_batch_size": 4,
    "lr": 5e-3,
    "eval_iters": 0,
    "split": "1,0,0",
    "ddp_bucket_size": 2000,
}


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def small(data_path: str, *words: str, **changes: Any) -> list[str]:
    return [*flags(data_path, **SMALL | changes), *words]


def assert_equal_tensors(actual: Outcome, expected: Outcome) -> None:
    assert actual.local.keys() == expected.local.keys()
    for name, values in expected.local.items():
        np.testing.assert_array_equal(actual.local[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [(["--bf16"], 1e-3), (["--fp16"], 2e-4), (["--fp16", "--accumulate-allreduce-grads-in-fp32"], 2e-4)],
)
def test_sixteen_bits_follow_float32(ranks: Ranks, data_path: str, words: list[str], tolerance: float) -> None:
    """A fifth of the tolerances was measured. The loss falls by an eighth meanwhile."""
    chosen = {"train_iters": 50, "initial_loss_scale": 65536}
    curves = [ranks(1, run_pretrain, small(data_path, *more, **chosen))[0].series("loss") for more in ([], words)]
    wide, narrow = map(np.array, curves)
    assert wide[-1] < 0.88 * wide[0]
    assert np.abs(narrow / wide - 1).max() <= tolerance
    assert (narrow != wide).any()


SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.mark.parametrize(
    ("layout", "words", "rank", "kind"),
    [
        ((2, 1), [], 1, "gradient"),  # of one tensor rank alone
        ((1, 1), [], 1, "gradient"),  # of one data rank alone
        ((1, 1), SHARDED, 1, "gradient"),  # in the share of one data rank alone
        ((1, 1), SHARDED, 1, "loss"),
        ((1, 2), [], 0, "gradient"),  # of one stage alone
        ((1, 2), SHARDED[:1], 1, "loss"),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, data_path: str, layout: tuple[int, int], words: list[str], rank: int, kind: str
) -> None:
    """Nothing changes but the loss scale: halved at the second overflow, as `--hysteresis` is 2."""
    tensor, pipeline = layout
    chosen = {"train_iters": 6, "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    line = small(data_path, "--fp16", *words, **chosen, initial_loss_scale=1024, lr_warmup_iters=4)
    passes = (2, 3) if layout == (1, 1) else (4, 5, 6, 7)  # of the third and the fourth iteration
    before = ranks(2, run_pretrain, [*line, "--exit-interval", "2"])
    after = ranks(2, run_with_fault, [*line, "--exit-interval", "4"], Fault(kind, (rank,), passes))
    for now, then in zip(after, before, strict=True):
        assert_equal_tensors(now, then)
    first = reporting(after)
    assert first.series("loss-scale") == [1024.0, 1024.0, 1024.0, 512.0]
    assert first.series("lr")[2:] == [first.series("lr")[2]] * 2  # the schedule stands still
    assert first.series("consumed-samples") == [8, 16, 24, 32]  # and the data goes on
    assert [step.get("skipped-iterations", 0) for step in first.steps] == [0, 0, 1, 2]
    assert ["loss" in step for step in first.steps] == [True, True, False, False]
    assert [m for m in first.messages if "skipped" in m] == [
        "iteration 3 is skipped: gradients overflow at the loss scale 1024",
        "iteration 4 is skipped: gradients overflow at the loss scale 1024, which is 512 from now on",
    ]
    for outcome in after:
        run = outcome.progress["run"]
        assert (run["scheduled_samples"], run["skipped_iterations"]) == (16, 2)
        assert outcome.progress["optimizer"]["step_count"] == 2


def test_the_loss_scale_grows_after_clean_windows(ranks: Ranks, data_path: str) -> None:
    """Two clean steps double it, an overflow begins the count anew; powers of two do not change what is trained."""
    chosen = {"train_iters": 8, "initial_loss_scale": 16, "loss_scale_window": 2, "hysteresis": 1}
    line = small(data_path, "--fp16", **chosen, micro_batch_size=8)
    growing = ranks(1, run_with_fault, line, Fault("gradient", (0,), (5,)))[0]
    assert growing.series("loss-scale") == [16, 32, 32, 64, 64, 32, 32, 64]


def test_a_static_loss_scale_stays_and_is_divided_out(ranks: Ranks, data_path: str) -> None:
    fault = Fault("gradient", (0,), (1,))
    line = small(data_path, "--fp16", train_iters=5, micro_batch_size=8)
    runs = {scale: ranks(1, run_with_fault, [*line, "--loss-scale", str(scale)], fault)[0] for scale in (2048, 16384)}
    for scale, outcome in runs.items():
        assert outcome.series("loss-scale") == [scale] * 5
        assert outcome.steps[-1]["skipped-iterations"] == 1
    taken = [[step["loss"] for step in outcome.steps if "loss" in step] for outcome in runs.values()]
    assert len(taken[0]) == 4
    assert_close(taken[0], taken[1], 1e-5)


def test_too_many_skipped_steps_end_the_run(ranks: Ranks, data_path: str, tmp_path: Path) -> None:
    words = small(data_path, "--fp16", max_skipped_steps=3, train_iters=9, micro_batch_size=8, save=tmp_path / "saved")
    fault = Fault("gradient", (0,), tuple(range(2, 9)))
    assert ranks(1, failure_with_fault, [*words, "--initial-loss-scale", "1024"], fault)[0].startswith(
        "iteration 5: --max-skipped-steps 3: 3 steps in a row were skipped, as gradients are not finite"
    )
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "layout"), [([], (2, 1, 2)), (["--bf16", *SHARDED], (1, 1, 4)), (["--bf16", *SHARDED], (1, 2, 2))]
)
def test_a_loss_of_nan_ends_the_run_and_saves_nothing(
    ranks: Ranks, data_path: str, tmp_path: Path, words: list[str], layout: tuple[int, int, int]
) -> None:
    """The last replica, in the second of two micro-batches of the fourth iteration."""
    tensor, pipeline, data = layout
    chosen = {"micro_batch_size": 2, "global_batch_size": 4 * data, "save": tmp_path / "saved", "save_interval": 2}
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    line = small(data_path, *words, **sizes, **chosen)
    wrong = Fault("loss", tuple(range(4 - tensor, 4)), (7,))
    told = ranks(4, failure_with_fault, line, wrong)
    last = 4 * 4 * data - 1
    sentence = (
        f"iteration 4: the loss is not finite on rank {4 - tensor}, for the samples {last - 1} to {last} in the order "
        "of the run (from 0); nothing of this iteration is saved"
    )
    assert told == [sentence] * 4
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]
    resumed = ranks(4, run_pretrain, [*line, "--load", str(tmp_path / "saved"), "--exit-interval", "3"])
    assert reporting(resumed).series("iteration") == [3]


def test_a_loss_of_nan_on_one_tensor_rank_is_known_to_all(ranks: Ranks, data_path: str) -> None:
    """And is that rank's in the words; on the other the sums of losses are finite."""
    line = small(data_path, micro_batch_size=2, tensor_model_parallel_size=2)
    sentence = "iteration 2: the loss is not finite on rank {}, for the samples {} to {} in the order of the run"
    for world, wrong, first in ((2, 1, 10), (4, 3, 14)):
        told = ranks(world, failure_with_fault, line, Fault("loss", (wrong,), (5 if world == 2 else 3,)))
        assert len(set(told)) == 1
        assert told[0].startswith(sentence.format(wrong, first, first + 1))


def test_a_loss_of_nan_is_left_to_the_gradients_when_asked(ranks: Ranks, data_path: str) -> None:
    words = small(data_path, "--no-check-for-nan-in-loss", micro_batch_size=8)
    told = ranks(1, failure_with_fault, words, Fault("loss", (0,), (1,)))[0]
    assert told.startswith("iteration 2: the gradient norm is nan")


def test_a_device_without_bfloat16_is_refused(
    data_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_room, "device_facts", lambda device: ("Tesla V100-SXM2-32GB", (7, 0)))
    pretrain_gpt.main(small(data_path, "--fp16", train_iters=1, lr_warmup_iters=0))
    with pytest.raises(SystemExit) as caught:
        pretrain_gpt.main(small(data_path, "--bf16"))
    assert caught.value.code == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("error: --bf16: Tesla V100-SXM2-32GB (compute capability 7.0) does not calculate in")
