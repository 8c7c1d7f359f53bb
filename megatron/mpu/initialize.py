"""The process groups of model and data parallelism: made or adopted, handed out, destroyed.

This file holds the groups of the process, its only mutable state beside the RNG tracker. Names are Megatron-LM 2.5's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.mpu.groups import Groups, make_groups, take_groups
from megatron.mpu.topology import Topology


@dataclass(frozen=True)
class GroupInfo:
    """A tensor-parallel group as a layer needs it: the handle, this rank's place in it, and its size.

    `group` is None for a group of one, and where sizes were set by hand without any processes (to build the shard of
    some rank on the meta device, say); a collective over the latter raises. `ValueError` for a rank that the group does
    not have.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"tensor model parallel rank {self.rank} of {self.size}: it must be at least 0 and below the size, see "
                "mpu.set_tensor_model_parallel_rank and mpu.set_tensor_model_parallel_world_size"
            )

    def __deepcopy__(self, memo: object) -> GroupInfo:
        """A process group is a handle to something outside: a copied layer keeps talking to the same ranks."""
        return self


Group: TypeAlias = "dist.ProcessGroup | GroupInfo | None"

SERIAL_GROUP = GroupInfo(None, 0, 1)  # a layer given this group is its own serial twin, whatever is initialised


@dataclass
class _State:
    """Everything that `destroy_model_parallel` forgets."""

    topology: Topology | None = None
    groups: Groups = field(default_factory=Groups)
    ranks_set: dict[str, int] = field(default_factory=dict)
    sizes_set: dict[str, int] = field(default_factory=dict)
    virtual_rank: int | None = None
    virtual_size: int | None = None


_state = _State()


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> None:
    """Make the groups of this run. Collective: every rank of the world calls it with the same sizes.

    Data parallelism takes the ranks that are left. Needs `torch.distributed.init_process_group` before.

    Args:
        timeout: of the collectives of the new groups; the backend's default where it is None.

    Raises:
        ValueError: sizes below 1 or that do not divide the world size; they are never made to fit.
        RuntimeError: called twice without `destroy_model_parallel`, or before `torch.distributed` is initialised.
    """
    _check_can_start()
    topology = Topology(dist.get_world_size(), tensor_model_parallel_size_, pipeline_model_parallel_size_)
    virtual = virtual_pipeline_model_parallel_size_
    problems = topology.problems() + _virtual_problems(virtual, pipeline_model_parallel_size_)
    if problems:
        raise ValueError("; ".join(problems))
    _start(topology, {}, virtual, timeout)


def adopt_device_mesh(
    mesh: DeviceMesh,
    tensor_dim: str | None = None,
    data_dim: str | None = None,
    pipeline_dim: str | None = None,
    *,
    virtual_pipeline_model_parallel_size: int | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Take the groups from a `DeviceMesh` that the caller already has, each named by its mesh dimension.

    A dimension that is None has one rank. The mesh must hold every rank of the world, and every dimension of it must be
    named. Groups that a mesh does not have (embedding, model, those of an absent dimension) are made, so this is
    collective over the world. `destroy_model_parallel` leaves the mesh's own groups alone.

    Raises:
        ValueError: a name that the mesh does not have, dimensions left over, a mesh smaller than the world, or one
            whose process groups hold their ranks in another order than the mesh.
    """
    _check_can_start()
    topology, adopted = take_groups(mesh, tensor_dim, data_dim, pipeline_dim)
    problems = _virtual_problems(virtual_pipeline_model_parallel_size, topology.pipeline)
    if problems:
        raise ValueError("; ".join(problems))
    _start(topology, adopted, virtual_pipeline_model_parallel_size, timeout)


def _check_can_start() -> None:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    if _state.topology is not None:
        raise RuntimeError("model parallelism is initialised already: call destroy_model_parallel first")


def _virtual_problems(virtual: int | None, pipeline: int) -> list[str]:
    if virtual is None:
        return []
    if virtual < 1:
        return [f"virtual pipeline model parallel size {virtual}: it must be at least 1"]
    if virtual > 1 and pipeline < 2:
        return [f"virtual pipeline model parallel size {virtual}: it needs a pipeline model parallel size of 2 or more"]
    return []


def _start(
    topology: Topology, adopted: dict[str, dist.ProcessGroup], virtual: int | None, timeout: timedelta | None
) -> None:
    groups = make_groups(topology, adopted, timeout)
    _replace_state(_State(topology, groups, virtual_rank=None if virtual is None else 0, virtual_size=virtual))


def _replace_state(state: _State) -> None:
    global _state
    _state = state


def destroy_model_parallel() -> None:
    """Forget all groups, sizes and ranks, set ones included, and destroy the process groups that were made here.

    Afterwards `initialize_model_parallel` may be called again at other sizes. Harmless when nothing was initialised.
    """
    made = _state.groups.made
    _replace_state(_State())
    if dist.is_initialized():
        for group in made:
            with contextlib.suppress(ValueError):  # gone already, with the default group that it came from
                dist.destroy_process_group(group)


def is_unitialized() -> bool:
    """Whether no groups exist yet (spelt as in Megatron-LM)."""
    return _state.topology is None


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` or `adopt_device_mesh` was called and not undone."""
    return _state.topology is not None


def get_topology() -> Topology:
    """The grid of this run; one rank alone where nothing was initialised in a world of one."""
    if _state.topology is not None:
        return _state.topology
    _check_alone("the topology")
    return Topology(1)


def resolve_group(group: Group = None) -> GroupInfo:
    """The tensor-parallel group that `group` means: itself, or the current one where it is None.

    Where it is None and nothing was initialised, a group of one. This is what `group=None` means all over mpu.

    Raises:
        ValueError: this rank is no member of the process group `group`, or a rank and size set by hand do not fit.
    """
    if isinstance(group, GroupInfo):
        return group
    if group is not None:
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("group: this rank is not a member of the process group given")
        return GroupInfo(group, rank, dist.get_world_size(group))
    if "tensor" in _state.sizes_set or "tensor" in _state.ranks_set:
        return GroupInfo(None, _rank("tensor"), _size("tensor"))
    if _state.topology is None:
        return SERIAL_GROUP
    return GroupInfo(_state.groups.handles["tensor"], _rank("tensor"), _size("tensor"))


def _check_alone(what: str) -> None:
    """A world of one needs no initialisation; a larger one does, else each rank would take itself for the only one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(f"{what} is not known yet: call mpu.initialize_model_parallel first")


def _group(kind: str) -> dist.ProcessGroup:
    if kind not in _state.groups.handles:
        if _state.topology is not None:
            raise RuntimeError(f"this rank (pipeline stage {_rank('pipeline')}) is in no {kind} group")
        raise RuntimeError(f"there is no {kind} group yet: call mpu.initialize_model_parallel first")
    return _state.groups.handles[kind]


def _size(kind: str) -> int:
    if kind in _state.sizes_set:
        return _state.sizes_set[kind]
    if kind not in _state.groups.members:
        _check_alone(f"the {kind} parallel size")
        return 1
    return len(_state.groups.members[kind])


def _rank(kind: str) -> int:
    if kind in _state.ranks_set:
        return _state.ranks_set[kind]
    if kind not in _state.groups.members:
        _check_alone(f"the {kind} parallel rank")
        return 0
    return _state.groups.members[kind].index(dist.get_rank())


def _member(kind: str, place: Callable[[int, int], int]) -> int:
    """The global rank at `place(rank, size)` in this rank's group."""
    if kind not in _state.groups.members:
        _check_alone(f"the {kind} group")
        return 0
    members = _state.groups.members[kind]
    return members[place(_rank(kind), len(members)) % len(members)]


def get_model_parallel_group() -> dist.ProcessGroup:
    """All ranks that together hold one copy of the model (tensor and pipeline)."""
    return _group("model")


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The tensor-parallel group of this rank."""
    return _group("tensor")


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The pipeline of this rank."""
    return _group("pipeline")


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same shard of the model as this one."""
    return _group("data")


def get_embedding_group() -> dist.ProcessGroup:
    """First and last stage of this rank's pipeline; `RuntimeError` on a stage in the middle."""
    return _group("embedding")


def is_rank_in_embedding_group() -> bool:
    """Whether this rank's stage holds a copy of the word embedding (first or last)."""
    return is_pipeline_first_stage(ignore_virtual=True) or is_pipeline_last_stage(ignore_virtual=True)


def get_tensor_model_parallel_world_size() -> int:
    """Ranks in the tensor-parallel group, or what was set."""
    return _size("tensor")


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Set the size that layers and getters see, without processes; until `destroy_model_parallel`."""
    _state.sizes_set["tensor"] = world_size


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in its tensor-parallel group, or what was set."""
    return _rank("tensor")


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Set the rank that layers and getters see, without processes; until `destroy_model_parallel`."""
    _state.ranks_set["tensor"] = rank


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's tensor-parallel group."""
    return _member("tensor", lambda rank, size: 0)


def get_pipeline_model_parallel_world_size() -> int:
    """Stages of the pipeline, or what was set."""
    return _size("pipeline")


def set_pipeline_model_parallel_world_size(world_size: int) -> None:
    """Set the number of stages that getters see, without processes; until `destroy_model_parallel`."""
    _state.sizes_set["pipeline"] = world_size


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage, or what was set."""
    return _rank("pipeline")


def set_pipeline_model_parallel_rank(rank: int) -> None:
    """Set the stage that getters see, without processes; until `destroy_model_parallel`."""
    _state.ranks_set["pipeline"] = rank


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage of this pipeline."""
    return _member("pipeline", lambda rank, size: 0)


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this pipeline."""
    return _member("pipeline", lambda rank, size: size - 1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the stage after this one; after the last comes the first."""
    return _member("pipeline", lambda rank, size: rank + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before this one; before the first comes the last."""
    return _member("pipeline", lambda rank, size: rank - 1)


def get_data_parallel_world_size() -> int:
    """Ranks in the data-parallel group."""
    return _size("data")


def get_data_parallel_rank() -> int:
    """This rank's place in its data-parallel group."""
    return _rank("data")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks on each stage, None without an interleaved pipeline."""
    return _state.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The model chunk that is being built or run, None without an interleaved pipeline."""
    return _state.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Say which model chunk is being built or run."""
    _state.virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether the current model chunk (the stage, with `ignore_virtual`) holds the first layer."""
    if not ignore_virtual and _state.virtual_size is not None and _state.virtual_rank != 0:
        return False
    return _rank("pipeline") == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether the current model chunk (the stage, with `ignore_virtual`) holds the last layer."""
    if not ignore_virtual and _state.virtual_size is not None and _state.virtual_rank != _state.virtual_size - 1:
        return False
    return _rank("pipeline") == _size("pipeline") - 1
