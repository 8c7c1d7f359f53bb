"""Group tables against an independent enumeration, for machines that we do not have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.mpu.topology import KINDS, Topology


def enumerated(tensor: int, pipeline: int, data: int) -> dict[str, set[tuple[int, ...]]]:
    """Every group of each kind, found by comparing coordinates of all pairs of ranks through numpy's own layout."""
    grid = np.arange(tensor * pipeline * data).reshape(pipeline, data, tensor)

    def rows(table: np.ndarray) -> set[tuple[int, ...]]:
        return set(map(tuple, table.tolist()))

    return {
        "tensor": rows(grid.reshape(-1, tensor)),
        "data": rows(grid.swapaxes(1, 2).reshape(-1, data)),
        "pipeline": rows(grid.reshape(pipeline, -1).T),
        "model": rows(grid.swapaxes(0, 1).reshape(data, -1)),
        "embedding": rows(grid[[0, -1] if pipeline > 1 else [0]].reshape(min(pipeline, 2), -1).T),
    }


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "data"), [(16, 2, 4, 2), (512, 8, 1, 64), (3072, 8, 64, 6), (1, 1, 1, 1)]
)
def test_tables_equal_the_enumeration(world: int, tensor: int, pipeline: int, data: int) -> None:
    topology = Topology(world, tensor, pipeline)
    assert topology.problems() == []
    assert topology.data == data
    for kind, groups in enumerated(tensor, pipeline, data).items():
        table = topology.groups(kind)
        assert set(map(tuple, table)) == groups, kind
        assert len(table) == len(groups), f"{kind}: a group appears twice"


def test_the_sixteen_rank_example_of_the_papers() -> None:
    """Two machines of eight: tensor groups are neighbours, the pipeline strides by four (arXiv:2104.04473's order)."""
    topology = Topology(16, tensor=2, pipeline=4)
    assert topology.groups("tensor") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert sorted(topology.groups("data")) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert sorted(topology.groups("pipeline")) == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert topology.groups("model") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert sorted(topology.groups("embedding")) == [[0, 12], [1, 13], [2, 14], [3, 15]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_rank_finds_itself(tensor: int, pipeline: int, data: int, random: object) -> None:
    world = tensor * pipeline * data
    order = list(range(world))
    random.shuffle(order)  # type: ignore[attr-defined]
    for ranks in (None, tuple(order)):
        topology = Topology(world, tensor, pipeline, ranks)
        for rank in range(world):
            at = topology.coordinates(rank)
            assert topology.rank_of(at.tensor, at.data, at.pipeline) == rank
            for kind in KINDS:
                holding = [group for group in topology.groups(kind) if rank in group]
                assert topology.group_of(kind, rank) == (holding[0] if holding else [])
                assert len(holding) == (0 if kind == "embedding" and 0 < at.pipeline < pipeline - 1 else 1)


def test_sizes_that_do_not_divide_are_told_and_not_made_to_fit() -> None:
    problems = Topology(16, tensor=3, pipeline=2).problems()
    assert len(problems) == 1
    assert all(number in problems[0] for number in ("3", "2", "6", "16"))
    with pytest.raises(ValueError, match="world size 16"):
        Topology(16, tensor=32).groups("tensor")
    assert len(Topology(0, tensor=0, pipeline=-1).problems()) == 3


def test_what_lies_outside_the_grid_is_refused() -> None:
    topology = Topology(8, tensor=2, pipeline=2)
    with pytest.raises(ValueError, match="rank 8"):
        topology.coordinates(8)
    with pytest.raises(ValueError, match="data coordinate 2"):
        topology.rank_of(0, 2, 0)
    for ask in (topology.groups, lambda kind: topology.group_of(kind, 0)):
        with pytest.raises(ValueError, match="accepted are tensor, data, pipeline, model, embedding"):
            ask("expert")
