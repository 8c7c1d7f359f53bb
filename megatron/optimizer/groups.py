"""The groups of ranks that an optimizer works with."""

import dataclasses

from torch.distributed import ProcessGroup

from megatron.mpu.initialize import SERIAL_GROUP, GroupInfo, resolve_group


@dataclasses.dataclass(frozen=True)
class RankGroups:
    """Who else has what this rank has; each group with this rank's place in it.

    Attributes:
        data: ranks with the same weights and other samples.
        tensor: ranks that share the layers.
        model: ranks that hold one copy of the model together.
        everyone: model ranks x data ranks; of one rank where it was not given.
        embedding: stages that have copies of the tied parameters; of one rank where there is no other.
    """

    data: GroupInfo
    tensor: GroupInfo
    model: GroupInfo
    everyone: GroupInfo
    embedding: GroupInfo = SERIAL_GROUP

    @property
    def places(self) -> int:
        """Number of different pieces of the gradients: one for each model rank and data shard."""
        return self.model.size * self.data.size

    def place(self, shard: int) -> int:
        """The number of a data shard of this model rank among the `places`."""
        return self.model.rank * self.data.size + shard

    def norm_group(self, sharded: bool) -> GroupInfo:
        """The ranks that hold different pieces of the reduced gradients. ValueError where `everyone` is missing."""
        if not sharded:
            return self.model
        if self.everyone.size == 1 and self.model.size == 1:
            return self.data
        if self.everyone.size != self.places:
            raise ValueError(
                f"the group of everyone has {self.everyone.size} ranks: the sharded optimizer needs one of "
                f"{self.model.size} model ranks x {self.data.size} data ranks"
            )
        return self.everyone


def info(group: ProcessGroup | None, rank: int | None = None) -> GroupInfo:
    """A group, None for this rank alone. ValueError where `rank` is given and is not this rank's place in it."""
    found = SERIAL_GROUP if group is None else resolve_group(group)
    if rank is not None and rank != found.rank:
        raise ValueError(f"rank {rank} in a group of {found.size} ranks: this rank's place in it is {found.rank}")
    return found
