"""What a run reads: `DataConfig`."""

import dataclasses

from megatron.base.complaints import problems_of
from megatron.base.config import Config, choice_problems, flag, flag_name, minimum_problems, range_problems
from megatron.data.blend import Blend, parse_blend
from megatron.data.splits import SPLIT_NAMES, parse_split
from megatron.data.token_sets import token_set_problems

_SHARE_PATHS = tuple(f"{name}_data_path" for name in SPLIT_NAMES)


@dataclasses.dataclass(frozen=True)
class DataConfig(Config):
    """Which token sets, how they are split and blended, and how samples are cut from them."""

    seq_length: int = flag(dataclasses.MISSING, "tokens in a sample")
    data_path: tuple[str, ...] | None = flag(
        None, "token set (its .bin and .idx files without the extension), or several: weight set weight set ..."
    )
    train_data_path: tuple[str, ...] | None = flag(None, "sets for training, as --data-path and in place of it")
    valid_data_path: tuple[str, ...] | None = flag(None, "sets for validation, beside --train-data-path")
    test_data_path: tuple[str, ...] | None = flag(None, "sets for the test, beside --train-data-path")
    split: str = flag("969,30,1", "weights of the train, validation and test shares of each set of --data-path")
    data_impl: str = flag("mmap", "how the token set is stored; infer is the same as mmap", choices=("mmap", "infer"))
    num_workers: int = flag(2, "processes that load samples beside the training process; 0 loads in it")
    dataloader_type: str = flag("single", "order of the samples: one pass, the same at any layout", choices=("single",))
    data_cache_path: str | None = flag(
        None, "folder for sample indices; if not given, index_cache beside each set, or else in ~/.cache/megatron"
    )
    data_cache_timeout_minutes: float = flag(30.0, "minutes to wait for sample indices that another process builds")
    reset_position_ids: bool = flag(False, "begin positions anew after each end of document")
    reset_attention_mask: bool = flag(False, "let each document in a sample attend to itself alone")
    eod_mask_loss: bool = flag(False, "leave out of the loss the token that follows an end of document")

    @property
    def needs_end_of_document(self) -> bool:
        """Whether it matters which token ends a document."""
        return self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "seq_length")
        found += minimum_problems(self, 0, "data_cache_timeout_minutes") + range_problems(self, 0, 1024, "num_workers")
        try:
            parse_split(self.split)
        except ValueError as error:
            found.append(str(error))
        return found + self._path_problems()

    def _path_problems(self) -> list[str]:
        given = [flag_name(name) for name in _SHARE_PATHS if getattr(self, name) is not None]
        if self.data_path is not None and given:
            return [f"--data-path and {given[0]}: give one set to be split by --split, or sets for each share"]
        if given and self.train_data_path is None:
            return [f"--train-data-path is missing: {given[0]} stands beside it"]
        found = []
        for name in ("data_path", *_SHARE_PATHS):
            words = getattr(self, name)
            assert not isinstance(words, str), f"{name} is a tuple of words"
            try:
                if words is not None:
                    parse_blend(words, flag_name(name))
            except ValueError as error:
                found += problems_of(error)
        return found

    def input_problems(self) -> list[str]:
        """What is wrong with the token sets, as far as opening them tells."""
        found = []
        try:
            for name, blend in self.blends().items():
                found += token_set_problems(blend, name)
        except ValueError as error:
            found += problems_of(error)
        return found

    def blends(self) -> dict[str, Blend]:
        """The sets that each flag of them names, by the flag. ValueError where there is none."""
        names = ("data_path", *_SHARE_PATHS)
        found = {
            flag_name(name): parse_blend(getattr(self, name), flag_name(name))
            for name in names
            if getattr(self, name) is not None
        }
        if not found:
            raise ValueError("--data-path is missing: the name of the .bin and .idx files without the extension")
        return found
