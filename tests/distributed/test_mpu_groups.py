"""Process groups on real ranks: made, destroyed and made again, adopted from a mesh; batches handed over; streams."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron import mpu
from tests.harness.ranks import Ranks

GETTERS = {
    "tensor": mpu.get_tensor_model_parallel_group,
    "data": mpu.get_data_parallel_group,
    "pipeline": mpu.get_pipeline_model_parallel_group,
    "model": mpu.get_model_parallel_group,
    "embedding": mpu.get_embedding_group,
}


def check_groups(rank: int) -> None:
    """Each group of this rank has the ranks of the table, and reduces over just those."""
    topology = mpu.get_topology()
    for kind, group in GETTERS.items():
        members = topology.group_of(kind, rank)
        if not members:
            continue
        # Only an adopted mesh can hold the ranks of its model group in another order than a process group does.
        assert dist.get_process_group_ranks(group()) == (sorted(members) if kind == "model" else members), kind
        total = torch.tensor([1 << rank])
        dist.all_reduce(total, group=group())
        assert total.item() == sum(1 << member for member in members), kind
    at = topology.coordinates(rank)
    assert at.tensor == mpu.get_tensor_model_parallel_rank()
    assert at.data == mpu.get_data_parallel_rank()
    assert at.pipeline == mpu.get_pipeline_model_parallel_rank()


def again_and_again(rank: int, world_size: int) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    for tensor, pipeline in ((2, 2), (1, 1), (4, 1), (1, 4), (2, 1), (2, 2)):
        mpu.initialize_model_parallel(tensor, pipeline)
        assert mpu.get_topology() == mpu.Topology(4, tensor, pipeline)
        check_groups(rank)
        mpu.destroy_model_parallel()
        assert len(dist.distributed_c10d._world.pg_map) == before, "a process group was left behind"
        assert mpu.is_unitialized()


def test_initialised_again_and_again_at_other_sizes(ranks: Ranks) -> None:
    ranks(4, again_and_again)


def adopt(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mpu.adopt_device_mesh(mesh, tensor_dim="tp", data_dim="dp")
    assert mpu.get_topology() == mpu.Topology(4, tensor=2)
    assert mpu.get_tensor_model_parallel_group() is mesh.get_group("tp")
    assert mpu.get_data_parallel_group() is mesh.get_group("dp")
    check_groups(rank)
    layer = mpu.ColumnParallelLinear(4, 6)
    assert layer(torch.ones(4))[0].shape == (6,)
    mpu.destroy_model_parallel()
    dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))  # the mesh's own groups are still there

    # Pipeline inside, tensor outside: another order of ranks than ours.
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    mpu.adopt_device_mesh(other, tensor_dim="tp", pipeline_dim="pp", virtual_pipeline_model_parallel_size=2)
    assert mpu.get_topology().groups("tensor") == [[0, 2], [1, 3]]
    assert mpu.get_tensor_model_parallel_rank() == rank // 2
    assert mpu.get_pipeline_model_parallel_rank() == rank % 2
    assert mpu.get_pipeline_model_parallel_next_rank() == rank ^ 1
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    check_groups(rank)


def refuse_meshes(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    backwards = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
    half = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    found = []
    for given, dims in (
        (mesh, {"tensor_dim": "model", "data_dim": "dp"}),
        (mesh, {"tensor_dim": "tp"}),
        (mesh, {"tensor_dim": "tp", "data_dim": "tp"}),
        (half, {"tensor_dim": "tp"}),
        (backwards, {"tensor_dim": "tp", "data_dim": "dp"}),
    ):
        try:
            mpu.adopt_device_mesh(given, **dims)
        except ValueError as error:
            found.append(str(error))
    assert mpu.is_unitialized()
    return found


def test_groups_of_a_device_mesh(ranks: Ranks) -> None:
    ranks(4, adopt)
    for unknown, left_over, twice, small, falling in ranks(4, refuse_meshes):
        assert unknown.startswith("tensor_dim 'model': the mesh has the dimensions dp, tp")
        assert "each must be named once" in left_over
        assert "each must be named once" in twice
        assert "must rise, as in their process group" in falling
        assert small.startswith("mesh of 2 ranks: it must hold all 4")


def hand_over(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(2)
    first = mpu.get_tensor_model_parallel_src_rank()
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool):
        whole = {
            "tokens": (torch.arange(6).view(2, 3) + first).to(dtype),
            "one": torch.ones((), dtype=dtype),
            "empty": torch.ones(0, 4, dtype=dtype),
            "transposed": (torch.arange(24).view(2, 3, 4) % 5 + first).to(dtype).transpose(0, 2),
        }
        got = mpu.broadcast_data(list(whole), whole if rank == first else None, dtype)
        assert list(got) == list(whole)
        for name, value in whole.items():
            assert got[name].dtype == dtype
            assert torch.equal(got[name], value), name
    for keys, data in ((["absent"], {"there": torch.ones(1)}), (["there"], {"there": torch.ones(1).double()})):
        words = keys[0] if rank == first else "first rank of the tensor group"
        with pytest.raises(ValueError, match=words):
            mpu.broadcast_data(keys, data if rank == first else None, torch.float32)


def test_a_batch_is_handed_from_the_first_tensor_rank(ranks: Ranks) -> None:
    ranks(4, hand_over)


def cannot_be_handed_over(rank: int, world_size: int) -> None:
    """What the first rank cannot send is told to the others, who would wait for ever."""
    mpu.initialize_model_parallel(2)
    first = mpu.get_tensor_model_parallel_src_rank()
    for value, words in (
        ([1.0, 2.0], "'x' is a list: all data must be tensors"),
        (None, "'x' is a NoneType"),
        (torch.ones(3).to_sparse(), ""),
        (torch.ones(3, device="meta"), ""),
    ):
        expected = words if rank == first else "first rank of the tensor group"
        with pytest.raises(ValueError, match=expected):
            mpu.broadcast_data(["x"], {"x": value} if rank == first else None, torch.float32)  # type: ignore[dict-item]
    weights = torch.arange(3.0, requires_grad=True)
    got = mpu.broadcast_data(["x"], {"x": weights} if rank == first else None, torch.float32)
    assert got["x"].tolist() == [0.0, 1.0, 2.0]
    assert not got["x"].requires_grad
    mpu.destroy_model_parallel()

    mpu.initialize_model_parallel(1)
    mpu.set_tensor_model_parallel_world_size(2)  # without processes: not a group of all ranks
    with pytest.raises(RuntimeError, match="set by hand"):
        mpu.broadcast_data(["x"], {"x": torch.ones(1)}, torch.float32)


def test_what_cannot_be_handed_over_is_told_to_all(ranks: Ranks) -> None:
    ranks(4, cannot_be_handed_over)


def streams(rank: int, world_size: int, tensor: int, pipeline: int) -> dict[str, Tensor]:
    mpu.initialize_model_parallel(tensor, pipeline)
    mpu.model_parallel_manual_seed(1234)
    tracker = mpu.get_rng_tracker()
    drawn = {"replicated": torch.rand(4)}
    for name in ("model-parallel-rng", "parameter-init-rng"):
        with tracker.fork(name):
            drawn[name] = torch.rand(4)
    mpu.destroy_model_parallel()
    return drawn


def test_streams_differ_where_they_must_and_nowhere_else(ranks: Ranks) -> None:
    tables = {(2, 1): mpu.Topology(4, 2, 1), (2, 2): mpu.Topology(4, 2, 2), (1, 2): mpu.Topology(4, 1, 2)}
    for sizes, topology in tables.items():
        drawn = ranks(4, streams, *sizes)
        for a in range(4):
            for b in range(4):
                same_region = topology.coordinates(a)[1:] == topology.coordinates(b)[1:]
                equal = {name: torch.equal(drawn[a][name], drawn[b][name]) for name in drawn[a]}
                assert equal == {
                    "replicated": same_region,
                    "model-parallel-rng": a == b,
                    "parameter-init-rng": True,
                }, (sizes, a, b)
