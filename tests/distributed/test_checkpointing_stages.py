"""Checkpoints of pipeline stages load at any number of stages and come back, optimizer state included, bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.checkpointing import Placed, load_checkpoint, save_checkpoint
from megatron.optimizer import Optimizer, PrecisionConfig
from tests.distributed.test_optimizer_parallel import ALL, PLAIN, data_place
from tests.distributed.test_optimizer_sharded import in_whole
from tests.harness.ranks import Ranks
from tests.harness.toy_stages import TIED, Stages, my_stages, stage_optimizer, train

# Name -> pipeline size, chunks of a rank, and how data ranks share the work. All on four ranks.
LAYOUTS: dict[str, tuple[int, int | None, dict[str, Any]]] = {
    "two stages of two chunks, sharded": (2, 2, ALL),
    "two stages": (2, None, PLAIN),
    "four stages": (4, None, PLAIN),
    "one stage, sharded": (1, None, ALL),
    "one stage": (1, None, PLAIN),
}


def start(layout: str) -> tuple[Stages, Optimizer]:
    pipeline, virtual, choices = LAYOUTS[layout]
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, pipeline, virtual)
    model = my_stages(torch.bfloat16)
    return model, stage_optimizer(model, PrecisionConfig(bf16=True), **choices)


def weights(model: Stages) -> Placed:
    shardings = mpu.parameter_shardings(model)
    return {name: (parameter, shardings[name]) for name, parameter in model.named_parameters()}


def save(model: Stages, optimizer: Optimizer, directory: Path) -> None:
    first = mpu.get_data_parallel_rank() == 0
    mine = {name: placed for name, placed in weights(model).items() if first and name not in model.duplicates}
    state = optimizer.state_tensors(duplicates=False) if first or optimizer.sharded else {}
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    save_checkpoint(directory, 1, {**mine, **state}, optimizer.state(), {}, **place, layout={})


def load(model: Stages, optimizer: Optimizer, directory: Path) -> None:
    wanted = {**weights(model), **optimizer.state_tensors()}
    for tensor, _ in wanted.values():
        tensor.detach().fill_(7.0)
    loaded = load_checkpoint(directory, wanted, rank=dist.get_rank(), world_size=dist.get_world_size(), layout={})
    optimizer.load_state(loaded.state)
    optimizer.after_load(masters=True)


def of_all_stages(model: Stages, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and state by name, after a check that copies are equal."""
    gathered: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, in_whole(optimizer, model))
    found: dict[str, Tensor] = {}
    for name, tensor in ((name, tensor) for part in gathered for name, tensor in part.items()):
        assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def any_number_of_stages(rank: int, world_size: int, directory: str) -> None:
    origin = "two stages of two chunks, sharded"
    model, optimizer = start(origin)
    train(model, optimizer, range(2), data_place())
    expected = of_all_stages(model, optimizer)
    assert len(expected) == 4 * len([name for name in expected if not name.startswith("optimizer.")])
    save(model, optimizer, Path(directory, "0"))
    for number, layout in enumerate([*LAYOUTS, origin]):
        model, optimizer = start(layout)
        load(model, optimizer, Path(directory, str(number)))
        assert optimizer.step_count == 2
        found = of_all_stages(model, optimizer)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])], layout
        save(model, optimizer, Path(directory, str(number + 1)))  # the next layout reads what this one writes


def test_saved_at_any_number_of_stages_and_loaded_at_any_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, any_number_of_stages, str(tmp_path))
    index = json.loads((tmp_path / "3" / "iter_0000001" / "index.json").read_text())
    (piece,) = index["tensors"][TIED]["pieces"]
    assert piece["file"] == "rank_00000.safetensors"  # of four stages the first one writes the tied words alone
