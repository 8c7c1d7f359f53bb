"""Making process groups from a topology, or taking them from a device mesh. Holds none: `initialize` does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.mpu.topology import KINDS, Topology


@dataclass
class Groups:
    """The groups of this rank by kind: handle and global ranks in order; and the handles that were made here."""

    handles: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    made: list[dist.ProcessGroup] = field(default_factory=list)


def make_groups(topology: Topology, adopted: Mapping[str, dist.ProcessGroup], timeout: timedelta | None) -> Groups:
    """Every group of `topology` that is not in `adopted`. Collective over the world, in one order on every rank."""
    groups = Groups(dict(adopted))
    tables = {kind: topology.groups(kind) for kind in KINDS}
    for kind, table in tables.items():
        members = topology.group_of(kind, dist.get_rank())
        if members:
            groups.members[kind] = members
        twin = _twin(kind, tables)
        if twin is not None and kind not in adopted:
            groups.handles[kind] = groups.handles[twin]
        elif kind not in adopted:
            _make_kind(groups, table, kind, timeout)
    _wait_for_all()
    return groups


def _wait_for_all() -> None:
    """With gloo, go on when every rank has its groups: one that destroys a group closes connections in the making."""
    if dist.get_world_size() > 1 and "gloo" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(()))


def _twin(kind: str, tables: dict[str, list[list[int]]]) -> str | None:
    """An earlier kind with the same groups that can serve for `kind` too: a communicator costs memory on the device.

    True of groups of one rank, and of the model group where there is no pipeline. Kinds whose collectives may be under
    way at the same time are kept apart.
    """
    candidates: tuple[str, ...] = ("tensor",) if kind == "model" else ()
    if len(tables[kind][0]) == 1:
        candidates = KINDS[: KINDS.index(kind)]
    return next((other for other in candidates if tables[other] == tables[kind]), None)


def _make_kind(groups: Groups, table: list[list[int]], kind: str, timeout: timedelta | None) -> None:
    """Every rank makes every group, its own or not, as `torch.distributed.new_group` asks; its own are kept."""
    for ranks in table:
        group = dist.new_group(ranks, timeout=timeout, group_desc=f"mpu_{kind}")
        if ranks == groups.members.get(kind):
            groups.handles[kind] = group
            groups.made.append(group)


def take_groups(
    mesh: DeviceMesh, tensor_dim: str | None, data_dim: str | None, pipeline_dim: str | None
) -> tuple[Topology, dict[str, dist.ProcessGroup]]:
    """The topology of `mesh` and the groups that it has, by kind; `ValueError` where it cannot be used."""
    dims = {"tensor": tensor_dim, "data": data_dim, "pipeline": pipeline_dim}
    named = {kind: dim for kind, dim in dims.items() if dim is not None}
    _check_mesh(mesh, named)
    topology = _mesh_topology(mesh, named)
    taken = {kind: mesh.get_group(dim) for kind, dim in named.items()}
    for kind, group in taken.items():
        members = topology.group_of(kind, dist.get_rank())
        if dist.get_process_group_ranks(group) != members:
            raise ValueError(f"mesh dimension {named[kind]}: its ranks {members} must rise, as in their process group")
    return topology, taken


def _check_mesh(mesh: DeviceMesh, dims: Mapping[str, str]) -> None:
    names = mesh.mesh_dim_names or ()
    for kind, dim in dims.items():
        if dim not in names:
            raise ValueError(f"{kind}_dim {dim!r}: the mesh has the dimensions {', '.join(names) or 'without names'}")
    if sorted(dims.values()) != sorted(names):
        raise ValueError(f"mesh dimensions {', '.join(names)}: each must be named once, given were {dims}")
    if mesh.size() != dist.get_world_size():
        raise ValueError(f"mesh of {mesh.size()} ranks: it must hold all {dist.get_world_size()} ranks of the world")


def _mesh_topology(mesh: DeviceMesh, dims: Mapping[str, str]) -> Topology:
    names = mesh.mesh_dim_names or ()
    order = [kind for kind in ("pipeline", "data", "tensor") if kind in dims]  # the tensor coordinate runs fastest
    ranks = tuple(mesh.mesh.permute([names.index(dims[kind]) for kind in order]).flatten().tolist())
    sizes = {kind: mesh.size(names.index(dim)) for kind, dim in dims.items()}
    in_our_order = ranks == tuple(range(len(ranks)))
    return Topology(len(ranks), sizes.get("tensor", 1), sizes.get("pipeline", 1), None if in_our_order else ranks)
