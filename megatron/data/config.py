"""What a run reads: `DataConfig`."""

import dataclasses

from megatron.base.config import Config, choice_problems, flag, minimum_problems
from megatron.data.indexed import IndexedDataset
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

    def input_problems(self) -> list[str]:
        """What is wrong with the token set, as far as opening it tells."""
        try:
            open_token_set(self)
        except ValueError as error:
            return [str(error)]
        return []


def open_token_set(config: DataConfig) -> IndexedDataset:
    """The token set that `--data-path` names. Raises ValueError, naming the flag, where it cannot be read."""
    if config.data_path is None:
        raise ValueError("--data-path is missing: the name of the .bin and .idx files without the extension")
    try:
        return IndexedDataset(config.data_path)
    except ValueError as error:
        raise ValueError(f"--data-path {config.data_path}: {error}") from None
