"""What the getters say in one process: nothing initialised, sizes set by hand, and a pretended world of 512."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron import mpu


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def pretend(rank: int, world_size: int) -> None:
    """A process group whose other ranks do not exist: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def test_one_process_needs_no_initialisation() -> None:
    assert mpu.is_unitialized()
    assert not mpu.model_parallel_is_initialized()
    sizes = (mpu.get_tensor_model_parallel_world_size, mpu.get_pipeline_model_parallel_world_size)
    ranks = (mpu.get_tensor_model_parallel_rank, mpu.get_pipeline_model_parallel_rank, mpu.get_data_parallel_rank)
    assert [size() for size in (*sizes, mpu.get_data_parallel_world_size)] == [1, 1, 1]
    assert [rank() for rank in (*ranks, mpu.get_tensor_model_parallel_src_rank)] == [0, 0, 0, 0]
    assert mpu.resolve_group() is mpu.SERIAL_GROUP
    assert mpu.get_topology() == mpu.Topology(1)
    assert mpu.is_pipeline_first_stage()
    assert mpu.is_pipeline_last_stage()
    with pytest.raises(RuntimeError, match="no tensor group yet"):
        mpu.get_tensor_model_parallel_group()
    with pytest.raises(RuntimeError, match="init_process_group first"):
        mpu.initialize_model_parallel()


def test_many_processes_do() -> None:
    """A launch that forgets to initialise must not run as many copies that each take themselves for the only one."""
    pretend(3, 8)
    for ask in (mpu.get_data_parallel_rank, mpu.get_tensor_model_parallel_world_size, mpu.get_topology):
        with pytest.raises(RuntimeError, match="call mpu.initialize_model_parallel first"):
            ask()


def test_sizes_set_by_hand_build_any_ranks_shard() -> None:
    mpu.set_tensor_model_parallel_world_size(8)
    mpu.set_tensor_model_parallel_rank(3)
    mpu.set_pipeline_model_parallel_world_size(4)
    mpu.set_pipeline_model_parallel_rank(3)
    assert (mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()) == (8, 3)
    assert (mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()) == (4, 3)
    assert (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()) == (False, True)
    layer = mpu.ColumnParallelLinear(16, 64, device="meta")
    assert layer.weight.shape == (8, 16)
    assert layer.sharding["weight"].offset == 24
    with pytest.raises(RuntimeError, match="set by hand"):
        layer(torch.empty(2, 16, device="meta"))
    mpu.destroy_model_parallel()
    assert mpu.get_tensor_model_parallel_world_size() == 1
    assert mpu.get_pipeline_model_parallel_rank() == 0


@pytest.mark.parametrize(("rank", "size"), [(9, 4), (4, 4), (-1, 4), (0, 0), (3, None)])
def test_a_rank_set_by_hand_that_its_group_does_not_have(rank: int, size: int | None) -> None:
    mpu.set_tensor_model_parallel_rank(rank)  # in any order: looked at when used
    if size is not None:
        mpu.set_tensor_model_parallel_world_size(size)
    with pytest.raises(
        ValueError, match=f"tensor model parallel rank {rank} of {1 if size is None else size}: it must"
    ):
        mpu.VocabParallelEmbedding(16, 4)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual", "words"),
    [
        (3, 1, None, ["3", "16"]),
        (32, 1, None, ["32", "16"]),
        (4, 8, None, ["32", "16"]),
        (0, 1, None, ["tensor model parallel size 0"]),
        (1, 1, 2, ["virtual pipeline model parallel size 2", "2 or more"]),
        (1, 4, 0, ["virtual pipeline model parallel size 0"]),
    ],
)
def test_sizes_are_refused_and_never_made_to_fit(
    tensor: int, pipeline: int, virtual: int | None, words: list[str]
) -> None:
    pretend(0, 16)
    with pytest.raises(ValueError, match=words[0]) as error:
        mpu.initialize_model_parallel(tensor, pipeline, virtual)
    assert all(word in str(error.value) for word in words)
    assert mpu.is_unitialized()


@pytest.mark.parametrize("rank", [0, 77, 511])
def test_a_world_of_512(rank: int) -> None:
    pretend(rank, 512)
    mpu.initialize_model_parallel(8)
    place, first = rank % 8, rank - rank % 8
    assert mpu.get_tensor_model_parallel_rank() == place
    assert mpu.get_data_parallel_rank() == rank // 8
    assert mpu.get_data_parallel_world_size() == 64
    assert dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group()) == list(range(first, first + 8))
    assert dist.get_process_group_ranks(mpu.get_data_parallel_group()) == list(range(place, 512, 8))
    assert dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group()) == [rank]
    assert mpu.get_tensor_model_parallel_src_rank() == first
    # One communicator serves two kinds that have the same ranks and never run at once.
    assert mpu.get_model_parallel_group() is mpu.get_tensor_model_parallel_group()
    assert mpu.get_embedding_group() is mpu.get_pipeline_model_parallel_group()


@pytest.mark.parametrize("rank", [5, 21, 63])
def test_pipeline_getters(rank: int) -> None:
    pretend(rank, 64)
    mpu.initialize_model_parallel(2, 4, 3)  # stages are 16 ranks apart
    stage, place = divmod(rank, 16)
    assert mpu.get_pipeline_model_parallel_rank() == stage
    assert mpu.get_pipeline_model_parallel_world_size() == 4
    assert mpu.get_pipeline_model_parallel_first_rank() == place
    assert mpu.get_pipeline_model_parallel_last_rank() == place + 48
    assert mpu.get_pipeline_model_parallel_next_rank() == (rank + 16) % 64
    assert mpu.get_pipeline_model_parallel_prev_rank() == (rank - 16) % 64
    assert mpu.is_rank_in_embedding_group() is (stage in (0, 3))
    if stage in (0, 3):
        assert dist.get_process_group_ranks(mpu.get_embedding_group()) == [place, place + 48]
    else:
        with pytest.raises(RuntimeError, match="in no embedding group"):
            mpu.get_embedding_group()
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 3
    for chunk in range(3):
        mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        assert mpu.get_virtual_pipeline_model_parallel_rank() == chunk
        assert mpu.is_pipeline_first_stage() is (stage == 0 and chunk == 0)
        assert mpu.is_pipeline_last_stage() is (stage == 3 and chunk == 2)
        assert mpu.is_pipeline_first_stage(ignore_virtual=True) is (stage == 0)
        assert mpu.is_pipeline_last_stage(ignore_virtual=True) is (stage == 3)


def test_destroy_forgets_everything_and_a_second_start_works() -> None:
    pretend(0, 16)
    mpu.initialize_model_parallel(2, 4, 2)
    with pytest.raises(RuntimeError, match="destroy_model_parallel first"):
        mpu.initialize_model_parallel()
    mpu.set_tensor_model_parallel_rank(1)
    made = mpu.get_data_parallel_group()
    mpu.destroy_model_parallel()
    assert mpu.is_unitialized()
    assert mpu.get_virtual_pipeline_model_parallel_rank() is None
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(made)  # gone already
    mpu.initialize_model_parallel(8)
    assert mpu.get_tensor_model_parallel_world_size() == 8
    assert mpu.get_tensor_model_parallel_rank() == 0
    dist.destroy_process_group()
    mpu.destroy_model_parallel()  # harmless after the world is gone


def test_a_group_that_this_rank_is_not_in() -> None:
    pretend(0, 4)
    others = dist.new_group([1, 2])
    with pytest.raises(ValueError, match="not a member"):
        mpu.ColumnParallelLinear(4, 4, group=others)
