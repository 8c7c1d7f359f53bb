"""The world of a run: what is adopted from the caller, and what a model in stages must say of itself."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron import mpu
from megatron.pipeline import PipelineConfig
from megatron.training.pipeline import make_pipeline
from megatron.training.setup import DistributedConfig, distributed_world


@pytest.fixture(params=["gloo", "cpu:gloo"])
def world_of_gloo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group that the caller has made, on a machine that has GPUs as well."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_an_adopted_group_says_the_backend(world_of_gloo: None, backend: str | None) -> None:
    with distributed_world(DistributedConfig(distributed_backend=backend), 1) as world:
        assert (world.device.type, world.rank, world.size, world.store) == ("cpu", 0, 1, None)
    assert dist.is_initialized()


def test_another_backend_than_that_of_the_adopted_group_is_refused(world_of_gloo: None) -> None:
    wanted = DistributedConfig(distributed_backend="nccl")
    sentence = "^--distributed-backend nccl: the process group that exists already is of (cpu:)?gloo$"
    with pytest.raises(ValueError, match=sentence), distributed_world(wanted, 1):
        pass


class InStages(nn.Module):
    """Two stages, and no word on which parameter is in which."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def boundary_shape(self, micro_batch: int, length: int) -> tuple[int, ...]:
        return micro_batch, length


def test_a_model_in_stages_must_say_whose_its_parameters_are() -> None:
    with pytest.raises(ValueError, match=r"the model has 2 stages on this rank and no parameter_chunks\(\), a dict"):
        make_pipeline(
            InStages(),
            PipelineConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
            2,
            batch=(1, 1),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
