"""`pretrain` with a model and a dataset that are not ours: equal replicas, no more asked of them than is said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.loop import pretrain
from tests.harness.ranks import RankError, Ranks
from tests.harness.runs import Recorder, flags

VOCAB = 20


class OwnModel(nn.Module):
    """Plain layers, drawn from the default generator, beside layers of mpu."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embedding = nn.Embedding(VOCAB, 16, **where)
        self.up = mpu.ColumnParallelLinear(16, 32, gather_output=False, **where)
        self.down = mpu.RowParallelLinear(32, 16, input_is_parallel=True, **where)
        self.out = nn.Linear(16, VOCAB, **where)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, v]."""
        hidden = self.embedding(tokens)
        return self.out(hidden + self.down(torch.tanh(self.up(hidden)[0]))[0])


class NormedModel(OwnModel):
    """With a layer whose statistics are buffers, and a buffer that is in no state dict."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.norm = nn.BatchNorm1d(16, dtype=dtype, device=device)
        self.embedding.register_forward_hook(lambda module, args, out: self.norm(out.flatten(0, 1)).view_as(out))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


class OwnSamples:
    """Every token is followed by the next number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        tokens = (torch.arange(17) * (index + 1)) % VOCAB
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    return losses, torch.tensor(batch["labels"].numel())


def train(
    rank: int, world_size: int, tensor: int, length: int, spoilt: bool, pipeline: int = 1
) -> list[dict[str, float]]:
    layout = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    words = flags("none", **layout, train_iters=8, params_dtype="float64", eval_iters=0)
    config = parse_composed(RunConfig, words, world_size=world_size, check_inputs=False)
    recorder = Recorder()

    def provide(dtype: torch.dtype, device: torch.device) -> nn.Module:
        model = OwnModel(dtype, device)
        if spoilt and rank == 1:
            model.out.bias.data[3] += 1e-6
        return model

    pretrain(
        config,
        model_provider=provide,
        dataset_provider=lambda counts: (OwnSamples(length), None, None),
        forward_step=forward_step,
        vocab_size=VOCAB,
        observers=[recorder],
    )
    return recorder.steps


def test_plain_layers_start_and_stay_equal_at_every_layout(ranks: Ranks) -> None:
    losses = {
        (tensor, data): [step["loss"] for step in ranks(tensor * data, train, tensor, 64, False)[0]]
        for tensor, data in ((1, 1), (2, 1), (1, 2), (2, 2))
    }
    for layout, found in losses.items():
        assert found == pytest.approx(losses[1, 1], rel=1e-10), layout
    assert losses[1, 1][-1] < losses[1, 1][0]


def test_no_speed_in_flops_without_their_number(ranks: Ranks) -> None:
    step = ranks(1, train, 1, 64, False)[0][0]
    assert "tokens-per-second" in step
    assert "TFLOPs-per-device" not in step


def test_replicas_that_differ_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"the parameter out\.bias does not start equal on all data-parallel replicas"):
        ranks(2, train, 1, 64, True)


def test_a_model_without_stages_has_no_pipeline(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="--pipeline-model-parallel-size 2: it must be 1, the model has no stages"):
        ranks(2, train, 1, 64, False, 2)


def test_a_dataset_that_is_too_short_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="the training set has 63 samples, but the run needs 64"):
        ranks(1, train, 1, 63, False)


def train_normed(
    rank: int, world_size: int, tensor: int, words: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[float], str]:
    """The persistent buffers at the end, the losses of the evaluations, which depend on them, and what was said."""
    line = [*flags("none", tensor_model_parallel_size=tensor, train_iters=6), *words]
    recorder = Recorder()
    trained = pretrain(
        parse_composed(RunConfig, line, world_size=world_size, check_inputs=False),
        model_provider=NormedModel,
        dataset_provider=lambda counts: (OwnSamples(64), OwnSamples(16), None),
        forward_step=forward_step,
        vocab_size=VOCAB,
        observers=[recorder],
    )
    buffers = {name: buffer.numpy().copy() for name, buffer in trained.buffers().items()}
    return buffers, [e["loss"] for e in recorder.evaluations], "\n".join(recorder.messages)


def test_buffers_go_on_with_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's own at the same layout, the first one's elsewhere."""
    names = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for tensor, world in ((1, 1), (2, 4)):
        saving = ["--save", str(tmp_path / str(world))]
        whole = ranks(world, train_normed, tensor, [])
        ranks(world, train_normed, tensor, [*saving, "--exit-interval", "3"])
        resumed = ranks(world, train_normed, tensor, [*saving, "--load", saving[1]])
        assert resumed[0][1] == whole[0][1] != []
        for (mine, _, _), (theirs, _, _) in zip(resumed, whole, strict=True):
            assert mine.keys() == theirs.keys() == names
            for name in names:
                np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    first, other = whole[0][0], whole[-1][0]  # of two data ranks, which see other samples
    assert (first["norm.running_mean"] != other["norm.running_mean"]).any()
    elsewhere = ranks(2, train_normed, 1, ["--load", str(tmp_path / "4"), "--eval-iters", "0"])
    for buffers, _, _ in elsewhere:
        for name in names:
            np.testing.assert_array_equal(buffers[name], first[name], err_msg=name)
    said = elsewhere[0][2]
    assert "first data and tensor rank's values of norm.running_mean, norm.running_var, norm.num_batches" in said
