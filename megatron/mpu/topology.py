"""Which rank belongs to which group: pure arithmetic on the world size and the degrees of parallelism.

Ranks fill a grid with the tensor coordinate fastest, then data, then pipeline, `rank = tp + TP * (dp + DP * pp)`, so
that a tensor group is made of neighbours and sits inside a node.
"""

from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("tensor", "data", "pipeline", "model", "embedding")


class Coordinates(NamedTuple):
    """Where a rank sits in each dimension of the grid, counted from 0."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class Topology:
    """The grid of a run. Making one checks nothing: ask `problems()`; what cannot be computed raises `ValueError`.

    Attributes:
        world_size: number of ranks.
        tensor, pipeline: degrees of tensor and pipeline model parallelism; data parallelism takes what is left.
        ranks: the global ranks in grid order where they are not 0, 1, 2, ... (the groups of an adopted device mesh).
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    ranks: tuple[int, ...] | None = None

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty where the grid can be built."""
        sizes = {
            "tensor model parallel size": self.tensor,
            "pipeline model parallel size": self.pipeline,
            "world size": self.world_size,
        }
        found = [f"{name} {size}: it must be at least 1" for name, size in sizes.items() if size < 1]
        if not found and self.world_size % (self.tensor * self.pipeline):
            found.append(
                f"tensor model parallel size {self.tensor} times pipeline model parallel size {self.pipeline} is "
                f"{self.tensor * self.pipeline}: it must divide the world size {self.world_size}"
            )
        return found

    @property
    def data(self) -> int:
        """The data parallel size: what is left of the world after tensor and pipeline."""
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self.world_size // (self.tensor * self.pipeline)

    def rank_of(self, tensor: int, data: int, pipeline: int) -> int:
        """The global rank at these coordinates; `ValueError` where they lie outside the grid."""
        grid = {"tensor": (tensor, self.tensor), "data": (data, self.data), "pipeline": (pipeline, self.pipeline)}
        for name, (at, size) in grid.items():
            if not 0 <= at < size:
                raise ValueError(f"{name} coordinate {at}: it must be at least 0 and below {size}")
        position = tensor + self.tensor * (data + self.data * pipeline)
        return position if self.ranks is None else self.ranks[position]

    def coordinates(self, rank: int) -> Coordinates:
        """Where the global rank `rank` sits; `ValueError` where there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: it must be at least 0 and below the world size {self.world_size}")
        position = rank if self.ranks is None else self.ranks.index(rank)
        rest, tensor = divmod(position, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, data, pipeline)

    def groups(self, kind: str) -> list[list[int]]:
        """The global ranks of every group of one kind, each in the order of its coordinate.

        `kind` is "tensor", "data", "pipeline" (all ranks that differ in that coordinate alone), "model" (all ranks
        with one data coordinate) or "embedding" (first and last stage of each pipeline, the holders of the tied word
        embedding). Each kind but "embedding" takes every rank in exactly once.
        """
        tensors, datas, stages = range(self.tensor), range(self.data), range(self.pipeline)
        at = self.rank_of
        if kind == "tensor":
            return [[at(i, j, k) for i in tensors] for k in stages for j in datas]
        if kind == "data":
            return [[at(i, j, k) for j in datas] for k in stages for i in tensors]
        if kind == "pipeline":
            return [[at(i, j, k) for k in stages] for j in datas for i in tensors]
        if kind == "model":
            return [[at(i, j, k) for k in stages for i in tensors] for j in datas]
        if kind == "embedding":
            ends = sorted({0, self.pipeline - 1})
            return [[at(i, j, k) for k in ends] for j in datas for i in tensors]
        raise ValueError(f"kind of group {kind!r}: accepted are {', '.join(KINDS)}")

    def group_of(self, kind: str, rank: int) -> list[int]:
        """The group of that kind which holds `rank`; empty for "embedding" on a stage in the middle."""
        at = self.coordinates(rank)
        tensors, datas, stages = [at.tensor], [at.data], [at.pipeline]
        if kind in ("tensor", "model"):
            tensors = list(range(self.tensor))
        if kind in ("pipeline", "model"):
            stages = list(range(self.pipeline))
        if kind == "data":
            datas = list(range(self.data))
        if kind == "embedding":
            ends = sorted({0, self.pipeline - 1})
            stages = ends if at.pipeline in ends else []
        if kind not in KINDS:
            raise ValueError(f"kind of group {kind!r}: accepted are {', '.join(KINDS)}")
        return [self.rank_of(i, j, k) for k in stages for j in datas for i in tensors]
