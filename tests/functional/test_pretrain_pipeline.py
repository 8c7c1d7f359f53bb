"""Pipelines, virtual stages too, mixed with all else: the run of one rank; and what each rank really did."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

from megatron import mpu
from megatron.pipeline import Action, Exchange, PipelineConfig, programs
from megatron.pipeline.executor import Event, run_program
from megatron.training import pipeline as pipeline_room
from megatron.training.losses import Losses, LossRanks, NonFiniteLoss
from megatron.training.run import check_replicas
from megatron.training.timers import TIMERS
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, Recorder, assemble, flags, reporting, run_pretrain, write_documents

LAYERS = 4
LAYOUTS = [  # (tensor, pipeline, virtual, data)
    (1, 2, 1, 1),
    (1, 4, 1, 1),
    (1, 2, 2, 1),
    (2, 2, 1, 1),
    (2, 2, 2, 1),
    (1, 2, 1, 2),
    (2, 2, 1, 2),
]
Layout = tuple[int, int, int, int]

SP, SHARDED = "--sequence-parallel", "--use-distributed-optimizer"
OVERLAPS = ["--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def run(ranks: Ranks, data_path: str, layout: Layout, words: list[str], **changes: Any) -> list[Outcome]:
    tensor, pipeline, virtual, data = layout
    chosen = {"num_layers": LAYERS, "train_iters": 10, "tensor_model_parallel_size": tensor}
    chosen["pipeline_model_parallel_size"] = pipeline
    if virtual > 1:
        chosen["num_layers_per_virtual_pipeline_stage"] = LAYERS // (pipeline * virtual)
    return ranks(tensor * pipeline * data, run_pretrain, [*flags(data_path, **chosen | changes), *words])


def assert_equal_runs(actual: list[Outcome], expected: list[Outcome], tolerance: float) -> None:
    """Losses, gradient norms and evaluations; the first rank of the last stage tells them."""
    mine, theirs = reporting(actual), reporting(expected)
    for name in ("loss", "grad-norm"):
        difference = np.array(mine.series(name)) / np.array(theirs.series(name)) - 1
        assert np.abs(difference).max() <= tolerance * (1 if name == "loss" else 10), name
    assert len(mine.steps) == len(theirs.steps) > 0
    assert_close([e["loss"] for e in mine.evaluations], [e["loss"] for e in theirs.evaluations], tolerance)


@pytest.mark.parametrize("tying", [[], ["--untie-embeddings-and-output-weights"]], ids=["tied", "untied"])
def test_losses_at_every_layout_are_the_serial_ones(ranks: Ranks, data_path: str, tying: list[str]) -> None:
    serial = run(ranks, data_path, (1, 1, 1, 1), tying)
    assert serial[0].series("loss")[-1] < 0.99 * serial[0].series("loss")[0]
    for layout in LAYOUTS:
        outcomes = run(ranks, data_path, layout, tying)
        assert_equal_runs(outcomes, serial, 1e-5)
        tensor, pipeline, _, data = layout
        assert outcomes.index(reporting(outcomes)) == tensor * data * (pipeline - 1)


@pytest.mark.parametrize("tying", [[], ["--untie-embeddings-and-output-weights"]], ids=["tied", "untied"])
def test_weights_in_float64_are_the_serial_ones(ranks: Ranks, data_path: str, tying: list[str]) -> None:
    wide = {"params_dtype": "float64", "eval_iters": 0}
    serial = run(ranks, data_path, (1, 1, 1, 1), tying, **wide)
    expected = assemble(serial)
    assert ("output_layer.weight" in expected) == bool(tying)
    for layout in LAYOUTS:
        outcomes = run(ranks, data_path, layout, tying, **wide)
        assert_equal_runs(outcomes, serial, 1e-9)
        assert_close(assemble(outcomes), expected, 1e-9, floor=1e-3)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((2, 2, 2, 2), [SP, SHARDED, *OVERLAPS, "--recompute-granularity", "full"]),
        ((1, 2, 2, 2), [SHARDED, *OVERLAPS, "--recompute-granularity", "selective", "--attention-backend", "unfused"]),
        ((2, 2, 1, 2), ["--overlap-grad-reduce", "--checkpoint-activations", "--distribute-saved-activations"]),
        ((1, 3, 1, 1), ["--pipeline-schedule", "gpipe", "--account-for-embedding-in-pipeline-split"]),
    ],
)
def test_all_of_it_together(ranks: Ranks, data_path: str, layout: Layout, words: list[str]) -> None:
    """With a ramp-up, so that the micro-batches of an iteration become more, and documents apart from each other."""
    wide = {"params_dtype": "float64", "global_batch_size": 16, "rampup_batch_size": None, "ddp_bucket_size": 4000}
    both = ["--rampup-batch-size", "8", "8", "32", "--reset-attention-mask", "--eod-mask-loss", "--clip-grad", "0.5"]
    serial = run(ranks, data_path, (1, 1, 1, 1), both, **wide, train_iters=6, eval_interval=3)
    outcomes = run(ranks, data_path, layout, [*both, *words], **wide, train_iters=6, eval_interval=3)
    assert_equal_runs(outcomes, serial, 1e-9)
    assert_close(assemble(outcomes), assemble(serial), 1e-9, floor=1e-3)


def test_overlaps_shards_and_scattered_messages_change_no_bit(ranks: Ranks, data_path: str) -> None:
    """With dropout: none of them changes what is drawn."""
    less = {"hidden_dropout": 0.1, "train_iters": 4, "eval_iters": 0, "ddp_bucket_size": 4000}
    for layout, variants in {
        (1, 2, 2, 2): [["--overlap-grad-reduce"], [SHARDED, *OVERLAPS]],
        (2, 2, 1, 1): [["--no-scatter-gather-tensors-in-pipeline"], ["--recompute-granularity", "full"]],
    }.items():
        plain = run(ranks, data_path, layout, [], **less)
        weights = assemble(plain)
        for words in variants:
            outcomes = run(ranks, data_path, layout, words, **less)
            assert reporting(outcomes).series("loss") == reporting(plain).series("loss"), words
            assert reporting(outcomes).series("grad-norm") == reporting(plain).series("grad-norm"), words
            for name, values in assemble(outcomes).items():
                np.testing.assert_array_equal(values.numpy(), weights[name].numpy(), err_msg=f"{name} with {words}")


def test_dropout_streams(ranks: Ranks, data_path: str) -> None:
    """Each rank has one of its own; the other is shared by the tensor ranks of a stage, and by them alone."""
    none = {"train_iters": 0, "eval_iters": 0, "lr_warmup_iters": 0}
    states = [o.rng for o in run(ranks, data_path, (2, 2, 1, 1), [], **none)]
    kinds = {name: [state[name].tobytes() for state in states] for name in states[0]}
    different = {name: len(set(found)) for name, found in kinds.items()}
    assert sorted(different.values())[-1] == 4
    shared = [found for found in kinds.values() if len(set(found)) == 2]
    assert shared
    for found in shared:
        assert found[0] == found[1] != found[2] == found[3]


# --- what each rank did -----------------------------------------------------------------------------------------------


def recorded(rank: int, world_size: int, words: list[str]) -> list[list[Any]]:
    """The passes and exchanges of each program that this rank ran, in order."""
    ran: list[list[Any]] = []

    def recording(*args: Any, **named: Any) -> None:
        events: list[Event] = []
        run_program(*args, **named | {"observer": events.append})
        ran.append([event.what for event in events if event.kind != "wait"])

    with mock.patch.object(pipeline_room, "run_program", recording):
        run_pretrain(rank, world_size, words)
    return ran


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_order_of_the_work_is_the_schedule(ranks: Ranks, data_path: str, virtual: int) -> None:
    """Two iterations of four micro-batches, and an evaluation of two global batches."""
    words = flags(data_path, num_layers=LAYERS, train_iters=2, lr_warmup_iters=0, pipeline_model_parallel_size=2)
    config = PipelineConfig(pipeline_model_parallel_size=2)
    training, evaluation = (programs(config.schedule(virtual, 4, forward_only=only)) for only in (False, True))
    more = ["--num-layers-per-virtual-pipeline-stage", "1"] if virtual == 2 else []
    for rank, ran in enumerate(ranks(2, recorded, [*words, *more])):
        assert ran == [training[rank]] * 2 + [evaluation[rank]] * 2
        assert {type(step) for step in ran[0]} == {Action, Exchange}


class Listener(Recorder):
    """Keeps what is said at the start."""

    description = ""

    def on_start(self, text: str) -> None:
        self.description = text


def described(rank: int, world_size: int, words: list[str]) -> tuple[str, list[dict[str, float]]]:
    listener = Listener()
    with mock.patch("tests.harness.runs.Recorder", return_value=listener):
        run_pretrain(rank, world_size, words)
    return listener.description, listener.steps


def test_what_the_last_stage_tells(ranks: Ranks, data_path: str) -> None:
    """The whole model's parameters, each counted once, the layout, and the times of all ranks if asked."""
    short = {"num_layers": LAYERS, "train_iters": 2, "lr_warmup_iters": 0, "eval_iters": 0}
    serial, plain = ranks(1, described, flags(data_path, **short))[0]
    stages = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    silent, (text, steps) = ranks(2, described, flags(data_path, **short, **stages, timing_log_level=1))
    assert silent == ("", [])
    assert text.split(" parameters")[0] == serial.split(" parameters")[0]
    assert "tensor 1, pipeline 2 (1f1b, 2 virtual stages each), data 1; " in text
    times = {f"{name}-{kind}-ms" for name in TIMERS for kind in ("min", "max")}
    for step in steps:
        assert step.keys() - plain[0].keys() == times
        assert all(0 < step[f"{name}-min-ms"] <= step[f"{name}-max-ms"] for name in TIMERS)


def test_there_is_no_dropout_while_evaluating(ranks: Ranks, data_path: str) -> None:
    """An evaluation of the weights at the start is that of a run of one rank without dropout."""
    none = {"train_iters": 0, "lr_warmup_iters": 0, "params_dtype": "float64"}
    expected = reporting(run(ranks, data_path, (1, 1, 1, 1), [], **none)).evaluations
    dropping = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    for layout in ((1, 2, 2, 1), (2, 2, 1, 1)):
        found = reporting(run(ranks, data_path, layout, [], **none, **dropping)).evaluations
        assert len(found) == len(expected) > 0
        assert_close([e["loss"] for e in found], [e["loss"] for e in expected], 1e-9)


def first_wrong(rank: int, world_size: int, wrong: list[tuple[int, int]]) -> tuple[int, int]:
    """Of three micro-batches on replicas of one rank each; `wrong` are (rank, micro-batch) whose loss is infinite."""
    world = mpu.resolve_group(dist.group.WORLD)
    losses = Losses("tokens", LossRanks(data=world, everyone=world), torch.device("cpu"))
    for number in range(3):
        losses.add(torch.tensor(math.inf if (rank, number) in wrong else 1.0), torch.tensor(1.0))
    with pytest.raises(NonFiniteLoss) as caught:
        losses.check()
    return caught.value.rank, caught.value.micro_batch


def test_the_first_loss_that_is_not_finite_is_named_on_all_replicas(ranks: Ranks) -> None:
    assert ranks(3, first_wrong, [(0, 2), (1, 1), (2, 1)]) == [(1, 1)] * 3
    assert ranks(3, first_wrong, [(2, 2)]) == [(2, 2)] * 3


class Halving(nn.Module):
    """A stage that only calculates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def test_replicas_without_parameters_are_equal() -> None:
    check_replicas(Halving())
