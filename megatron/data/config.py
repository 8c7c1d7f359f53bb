"""What a run reads: `DataConfig`."""

import dataclasses

from megatron.base.config import Config, choice_problems, flag, minimum_problems
from megatron.data.splits import parse_split


@dataclasses.dataclass(frozen=True)
class DataConfig(Config):
    """Which token set, how it is split, and how samples are cut from it."""

    seq_length: int = flag(dataclasses.MISSING, "tokens in a sample")
    data_path: str | None = flag(None, "token set: the name of its .bin and .idx files without the extension")
    split: str = flag("969,30,1", "weights of the train, validation and test shares of the token set")
    data_impl: str = flag("mmap", "how the token set is stored; infer is the same as mmap", choices=("mmap", "infer"))
    num_workers: int = flag(2, "processes that load samples beside the training process; 0 loads in it")
    eod_mask_loss: bool = flag(False, "leave out of the loss the token that follows an end of document")

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "seq_length")
        found += minimum_problems(self, 0, "num_workers")
        try:
            parse_split(self.split)
        except ValueError as error:
            found.append(str(error))
        return found
