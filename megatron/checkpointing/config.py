"""Where a run saves and loads its checkpoints, how often, and which one it starts from."""

import dataclasses
import os
from pathlib import Path

from megatron.base.config import Config, flag, minimum_problems
from megatron.checkpointing.folders import TRACKER, saved_iterations, tracked_iteration, whole_folder


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Config):
    """Folders and interval of checkpoints; raises `ConfigError` with all that is wrong when it is made."""

    save: str | None = flag(None, "folder to which checkpoints are saved; none are if not given")
    load: str | None = flag(None, "folder from whose latest checkpoint the run starts")
    save_interval: int | None = flag(None, "iterations between checkpoints; one at the end of the run in any case")
    keep_last: int | None = flag(None, "keep this many checkpoints below --save, the newest; all if not given")
    async_save: bool = flag(False, "train on while a checkpoint is written, from a copy in the host's memory")
    max_failed_saves: int = flag(3, "saves that may fail one after another before the run ends; each is told")
    ckpt_step: int | None = flag(None, "iteration of the checkpoint to load; the tracker's if not given")
    load_fallback: bool = flag(False, "where the checkpoint to load is damaged, take the newest earlier whole one")
    finetune: bool = flag(False, "take the weights alone from --load, and begin at iteration 0")
    load_optim: bool = flag(True, "take the optimizer's state from --load")
    load_rng: bool = flag(True, "take the states of random generators from --load")
    accept_data_change: bool = flag(False, "go on with other data, split, sequence length or batch size than before")

    def problems(self) -> list[str]:
        """One sentence for each contradiction and each folder that cannot be one."""
        found = minimum_problems(self, 1, "save_interval", "keep_last", "max_failed_saves")
        found += minimum_problems(self, 0, "ckpt_step")
        if self.save_interval is not None and self.save is None:
            found.append(f"--save-interval {self.save_interval}: it needs --save, the folder to save to")
        for name, folder in (("--save", self.save), ("--load", self.load)):
            if folder is not None and (not folder or os.path.exists(folder) and not os.path.isdir(folder)):
                found.append(f"{name} {folder!r}: it must be a folder")
        return found

    def input_problems(self) -> list[str]:
        """What is wrong with the checkpoint to load, as far as finding it tells."""
        try:
            iteration_to_load(self)
        except ValueError as error:
            return [str(error)]
        return []


def iteration_to_load(config: CheckpointConfig) -> int | None:
    """The iteration of the checkpoint that a run starts from, None where it starts afresh.

    That is the tracker's. Where `--load` and `--save` are one folder, a run may be its own successor: one without
    checkpoints starts afresh, and a checkpoint counts that was saved whole in the moment before its tracker.
    Raises ValueError where there is no checkpoint under any other `--load`.
    """
    if config.load is None:
        return None
    directory = Path(config.load)
    iteration = tracked_iteration(directory)
    if iteration is None:
        if config.save is None or os.path.realpath(config.save) != os.path.realpath(config.load):
            raise ValueError(f"--load {config.load}: there is no checkpoint in it, for there is no {TRACKER}")
        iteration = max(saved_iterations(directory), default=None)
    if iteration is not None:
        whole_folder(directory, iteration)
    return iteration
