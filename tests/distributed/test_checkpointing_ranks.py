"""Checkpoints of several ranks: any layout to any other, failures that all ranks hear of, exact resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megatron import mpu
from megatron.checkpointing import SaveError, load_checkpoint, save_checkpoint
from megatron.mpu.sharding import Sharding
from megatron.optimizer import Optimizer, OptimizerConfig
from tests.harness.collectives import CollectiveCounter
from tests.harness.ranks import Ranks

Placed = dict[str, tuple[Tensor, Sharding]]


def whole_tensors() -> dict[str, Tensor]:
    """The global tensors that every layout holds parts of."""
    draw = torch.Generator().manual_seed(1)
    return {
        "embedding": torch.randn(9, 4, generator=draw),  # a vocabulary, padded to 16 rows
        "columns": torch.randn(8, 4, generator=draw),
        "rows": torch.randn(3, 8, generator=draw).double(),
        "fused": torch.randn(16, 2, generator=draw).bfloat16(),  # two matrices, one above the other: stride 2
        "norm": torch.randn(5, generator=draw),
        "count": torch.tensor(7),
    }


def shardings_of(tensor: int, tensor_rank: int) -> dict[str, tuple[tuple[int, ...], Sharding]]:
    """Local shapes and shardings on one of `tensor` ranks."""
    r, t = tensor_rank, tensor
    return {
        "embedding": ((16 // t, 4), Sharding("embedding", (9, 4), 0, r * 16 // t, 1, t)),
        "columns": ((8 // t, 4), Sharding("columns", (8, 4), 0, r * 8 // t, 1, t)),
        "rows": ((3, 8 // t), Sharding("rows", (3, 8), 1, r * 8 // t, 1, t)),
        "fused": ((16 // t, 2), Sharding("fused", (16, 2), 0, r * 8 // t, 2, t)),
        "norm": ((5,), Sharding("norm", (5,), None, 0)),
        "count": ((), Sharding("count", (), None, 0)),
    }


def local_part(name: str, tensor: int, tensor_rank: int) -> Tensor:
    """What a rank holds of a whole tensor, cut without the library's own arithmetic."""
    whole = whole_tensors()[name]
    if name == "embedding":
        return torch.cat([whole, torch.zeros(7, 4)]).chunk(tensor)[tensor_rank]
    if name == "columns":
        return whole.chunk(tensor)[tensor_rank]
    if name == "rows":
        return whole.chunk(tensor, 1)[tensor_rank]
    if name == "fused":
        return torch.cat([half.chunk(tensor)[tensor_rank] for half in whole.chunk(2)])
    return whole


def parts(tensor: int, tensor_rank: int) -> Placed:
    return {
        name: (local_part(name, tensor, tensor_rank).clone(), sharding)
        for name, (_, sharding) in shardings_of(tensor, tensor_rank).items()
    }


def targets(tensor: int, tensor_rank: int) -> Placed:
    return {
        name: (torch.full(shape, 3).to(whole_tensors()[name].dtype), sharding)
        for name, (shape, sharding) in shardings_of(tensor, tensor_rank).items()
    }


def own_state(rank: int) -> dict[str, Tensor]:
    return {"rng.cpu": torch.full((6,), rank, dtype=torch.uint8)}


def save_at(directory: Path, rank: int, world_size: int, tensor: int, iteration: int = 1, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "tensors": parts(tensor, rank % tensor) if rank < tensor else {},
        "state": {"saved by": rank},
        "rank_tensors": own_state(rank),
        "rank": rank,
        "world_size": world_size,
        "layout": {"tensor": tensor, "data": world_size // tensor},
        "tensor_rank": rank % tensor,
    }
    save_checkpoint(directory, iteration, **{**arguments, **changes})


def every_layout(rank: int, world_size: int, directory: str) -> None:
    layouts = (1, 2, 4)
    for tensor in layouts:
        save_at(Path(directory, str(tensor)), rank, world_size, tensor)
    for saved_at in layouts:
        for tensor in layouts:
            wanted = targets(tensor, rank % tensor)
            loaded = load_checkpoint(
                Path(directory, str(saved_at)),
                wanted,
                rank=rank,
                layout={"tensor": tensor, "data": world_size // tensor},
                world_size=world_size,
            )
            assert loaded.state == {"saved by": 0}
            for name, (value, _) in wanted.items():
                assert torch.equal(value, local_part(name, tensor, rank % tensor)), (saved_at, tensor, name)
            assert (loaded.rank_tensors is not None) == (saved_at == tensor)
            if loaded.rank_tensors is not None:
                assert torch.equal(loaded.rank_tensors["rng.cpu"], own_state(rank)["rng.cpu"])


def test_saved_at_any_layout_and_loaded_at_any_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, every_layout, str(tmp_path))
    folder = tmp_path / "2" / "iter_0000001"
    keys = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            keys[path.stem] = set(file.keys())
    assert keys == {
        "rank_00000": {"embedding@0,0", "columns@0,0", "rows@0,0", "fused@0,0", "fused@8,0", "norm@0", "count@"}
        | {"rank0:rng.cpu@0"},
        "rank_00001": {"embedding@8,0", "columns@4,0", "rows@0,4", "fused@4,0", "fused@12,0", "rank1:rng.cpu@0"},
        "rank_00002": {"rank2:rng.cpu@0"},
        "rank_00003": {"rank3:rng.cpu@0"},
    }
    padding_only = json.loads((tmp_path / "4" / "iter_0000001" / "index.json").read_text())
    assert [piece["file"] for piece in padding_only["tensors"]["embedding"]["pieces"]] == [
        f"rank_0000{i}.safetensors" for i in range(3)
    ]


def count_collectives(rank: int, world_size: int, directory: str) -> dict[str, int]:
    with CollectiveCounter() as counter:
        save_at(Path(directory), rank, world_size, 2)
        load_checkpoint(
            directory, targets(2, rank), rank=rank, layout={}, world_size=world_size, group=dist.group.WORLD
        )
    # Each step of a save and of a load, the checksum of the index, and which of the tensors are wanted.
    assert [call.bytes for call in counter.calls] == [8] * 3 + [8, 16, len(whole_tensors()), 8]
    return dict(counter.counts)


def test_only_a_few_bytes_are_exchanged_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, count_collectives, str(tmp_path)) == [{"all_reduce": 7}] * 2


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def failures(rank: int, world_size: int, directory: str) -> list[str]:
    """Saves that fail on rank 1 only, before, in the middle of and after its file; then one that works."""
    save_at(Path(directory), rank, world_size, 2, iteration=1)
    messages = []
    for name in ("writer.dtype_name", "writer._write_block", "save.Contents"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(f"megatron.checkpointing.{name}", no_space)
            with pytest.raises(SaveError) as caught:
                save_at(Path(directory), rank, world_size, 2, iteration=2)
        messages.append(str(caught.value))
        dist.barrier()
        assert sorted(p.name for p in Path(directory).iterdir()) == [
            "iter_0000001",
            "latest_checkpointed_iteration.txt",
        ]
        assert load_checkpoint(directory, targets(2, rank), rank=rank, layout={}, world_size=2).iteration == 1
    save_at(Path(directory), rank, world_size, 2, iteration=2)
    assert load_checkpoint(directory, targets(2, rank), rank=rank, layout={}, world_size=2).iteration == 2
    return messages


def test_a_failure_on_one_rank_is_heard_by_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, failures, str(tmp_path))
    said, file = (
        "rank 1: OSError: [Errno 28] No space left on device",
        tmp_path / ".iter_0000002.tmp/rank_00001.safetensors",
    )
    assert first == second == [f"{said}: '{file}'", f"{said}: '{file}'", said]


def lost_folder(rank: int, world_size: int, directory: str) -> str:
    """Each rank sees another folder, as on nodes without a shared file system."""
    with pytest.raises(SaveError) as caught:
        save_at(Path(directory, str(rank)), rank, world_size, 2)
    return str(caught.value)


def test_a_folder_that_is_not_shared(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, lost_folder, str(tmp_path))
    assert first == second
    assert first.startswith("rank 1: FileNotFoundError") and "iter_0000001.tmp" in first


def written_twice(rank: int, world_size: int, directory: str) -> str:
    with pytest.raises(SaveError) as caught:
        save_at(Path(directory), rank, world_size, 2, tensor_rank=0)
    return str(caught.value)


def test_a_save_that_could_not_be_loaded_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, written_twice, str(tmp_path))
    assert first == second == "rank 0: tensor norm: the pieces at [0] and [0] overlap"
    assert list(tmp_path.iterdir()) == []


def damaged_for_one(rank: int, world_size: int, directory: str) -> str:
    save_at(Path(directory), rank, world_size, 2)
    if rank == 0:
        path = Path(directory, "iter_0000001", "rank_00001.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    with pytest.raises(ValueError, match="checksum") as caught:
        load_checkpoint(directory, targets(2, rank), rank=rank, layout={"tensor": 2, "data": 1}, world_size=world_size)
    return str(caught.value)


def test_damage_that_one_rank_meets_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, damaged_for_one, str(tmp_path))
    assert first == second
    assert first.startswith("rank 1: ") and "rank_00001.safetensors: tensor rank1:rng.cpu does not match" in first


STAGES = (("embedding", "columns", "norm"), ("rows", "fused", "count", "embedding"))
_WORDS = {
    "extra": "tensors of the model are not in the checkpoint: bias",
    "left": "tensors of the checkpoint are not in the model: fused",
    "shape": "tensor columns is float32 [8, 4] in the checkpoint and float64 [8, 4] in the model",
}


def stage_of(placed: Placed, stage: int) -> Placed:
    return {name: placed[name] for name in STAGES[stage]}


def refused(rank: int, world_size: int, directory: str) -> dict[str, str]:
    """Saves by two stages with other names, and loads with one thing wrong on one of them."""
    writes = stage_of(parts(1, 0), rank)
    if rank == 1:  # a copy, which the first stage writes
        del writes["embedding"]
    save_at(Path(directory), rank, world_size, 1, tensors=writes)
    messages = {}
    for wrong in _WORDS:
        wanted = stage_of(targets(1, 0), rank)
        if rank == 0 and wrong == "shape":
            wanted["columns"] = (wanted["columns"][0].double(), wanted["columns"][1])
        if rank == 1 and wrong == "extra":
            wanted["bias"] = (torch.zeros(4), Sharding("bias", (4,), None, 0))
        if rank == 1 and wrong == "left":
            del wanted["fused"]
        before = {name: tensor.clone() for name, (tensor, _) in wanted.items()}
        with pytest.raises(ValueError, match="tensors? ") as caught:
            load_checkpoint(directory, wanted, rank=rank, layout={}, world_size=world_size)
        assert all(torch.equal(tensor, before[name]) for name, (tensor, _) in wanted.items())
        messages[wrong] = str(caught.value)
    wanted = stage_of(targets(1, 0), rank)
    load_checkpoint(directory, wanted, rank=rank, layout={}, world_size=world_size)
    assert all(torch.equal(tensor, local_part(name, 1, 0)) for name, (tensor, _) in wanted.items())
    return messages


def test_stages_want_all_that_is_stored_together_and_nothing_else(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, refused, str(tmp_path))
    assert first == second
    for wrong, words in _WORDS.items():
        assert words in first[wrong]


def nothing_on_the_first(rank: int, world_size: int, directory: str) -> None:
    """The first rank has no tensor at all, neither to write nor to load."""
    everything = parts(1, 0) if rank == 1 else {}
    save_at(Path(directory), rank, world_size, 1, tensors=everything, rank_tensors={})
    wanted = targets(1, 0) if rank == 1 else {}
    assert load_checkpoint(directory, wanted, rank=rank, layout={}, world_size=world_size).state == {"saved by": 0}
    assert all(torch.equal(tensor, local_part(name, 1, 0)) for name, (tensor, _) in wanted.items())


def test_the_first_rank_may_hold_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, nothing_on_the_first, str(tmp_path))
    assert [path.name for path in (tmp_path / "iter_0000001").glob("*.safetensors")] == ["rank_00001.safetensors"]


def two_folders(rank: int, world_size: int, directory: str) -> str:
    """Each rank has a good checkpoint of its own, as on nodes without a shared file system."""
    mine = Path(directory, str(rank))
    save_at(mine, 0, 1, 1, state={"seed": rank})
    with pytest.raises(ValueError, match="same on all ranks") as caught:
        load_checkpoint(mine, targets(1, 0), rank=rank, layout={}, world_size=world_size)
    return str(caught.value)


def test_two_checkpoints_are_not_taken_for_one(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, two_folders, str(tmp_path)):
        assert "index.json: it is not the same on all ranks" in message


class Block(nn.Module):
    """Two parallel matrices, a norm, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = mpu.ColumnParallelLinear(8, 16, gather_output=False)
        self.down = mpu.RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(self.norm(x))
        with mpu.get_rng_tracker().fork():
            hidden = nn.functional.dropout(hidden, 0.3)
        return nn.functional.dropout(self.down(hidden)[0], 0.2)


def start(seed: int) -> tuple[Block, Optimizer]:
    mpu.get_rng_tracker().reset()
    mpu.model_parallel_manual_seed(seed)
    model = Block()
    group = mpu.get_tensor_model_parallel_group()
    rank = mpu.get_tensor_model_parallel_rank()
    shardings = mpu.parameter_shardings(model)
    return model, Optimizer(model, shardings, OptimizerConfig(), tensor_group=group, tensor_rank=rank)


def tensors_of(model: Block, optimizer: Optimizer) -> Placed:
    shardings = mpu.parameter_shardings(model)
    return {name: (p, shardings[name]) for name, p in model.named_parameters()} | optimizer.state_tensors()


def train(model: Block, optimizer: Optimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.reduce_gradients(4.0)
        norms.append(optimizer.step(0.01).grad_norm)
    return norms


def resume(rank: int, world_size: int, directory: str) -> None:
    mpu.initialize_model_parallel(world_size)
    layout = {"tensor": world_size}
    model, optimizer = start(seed=1)
    norms = train(model, optimizer, range(3))
    state = {"steps": optimizer.step_count, "norms": norms}
    save_checkpoint(
        directory,
        3,
        tensors_of(model, optimizer),
        state,
        mpu.rng_state(),
        rank=rank,
        world_size=world_size,
        layout=layout,
    )
    norms += train(model, optimizer, range(3, 6))

    other, resumed = start(seed=2)
    loaded = load_checkpoint(directory, tensors_of(other, resumed), rank=rank, layout=layout, world_size=world_size)
    assert loaded.rank_tensors is not None
    mpu.set_rng_state(loaded.rank_tensors)
    resumed.step_count = loaded.state["steps"]
    assert loaded.state["norms"] + train(other, resumed, range(3, 6)) == norms
    for name, (tensor, _) in tensors_of(model, optimizer).items():
        assert torch.equal(tensor, tensors_of(other, resumed)[name][0]), name


@pytest.mark.parametrize("world", [1, 2])
def test_training_with_dropout_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, resume, str(tmp_path))
