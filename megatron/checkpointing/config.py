"""Where a run saves and loads its checkpoints, how often, and which one it starts from."""

import dataclasses
import os
from pathlib import Path

from megatron.base.config import Config, flag, minimum_problems
from megatron.base.files import folder_problem
from megatron.checkpointing.choice import iterations_to_try, other_choice
from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.folders import complete_iterations, none_there, saved_iterations, whole_folder
from megatron.optimizer.state import OPTIMIZER_STATE


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
        if self.load is None:
            found += [f"{name}: it needs --load, the folder to load from" for name in self._of_loading()]
        if self.finetune and same_folder(self.save, self.load):
            found.append(
                f"--finetune: --save {self.save} must be another folder than --load: the new run counts from iteration "
                "0, and would replace the checkpoints that it starts from"
            )
        for name, folder in (("--save", self.save), ("--load", self.load)):
            if folder is not None and (not folder or os.path.exists(folder) and not os.path.isdir(folder)):
                found.append(f"{name} {folder!r}: it must be a folder")
        return found

    def _of_loading(self) -> list[str]:
        """The flags given that say what to load."""
        step = [] if self.ckpt_step is None else [f"--ckpt-step {self.ckpt_step}"]
        chosen = {
            "--load-fallback": self.load_fallback,
            "--finetune": self.finetune,
            "--no-load-optim": not self.load_optim,
            "--no-load-rng": not self.load_rng,
        }
        return step + [name for name, given in chosen.items() if given]

    @property
    def loads_optimizer(self) -> bool:
        """Whether the optimizer's state is taken from the checkpoint to load."""
        return self.load_optim and not self.finetune

    @property
    def unread(self) -> tuple[str, ...]:
        """The beginnings of the names that are left unread of the checkpoint to load."""
        return () if self.loads_optimizer else (OPTIMIZER_STATE,)

    def input_problems(self) -> list[str]:
        """What is wrong with the folder to save to and with the checkpoint to load, as far as finding it tells."""
        problem = None if self.save is None else folder_problem(self.save)
        found = [] if problem is None else [f"--save {self.save}: it cannot be written, for {problem}"]
        try:
            iterations_to_load(self)
        except ValueError as error:
            found.append(str(error))
        return found


def iterations_to_load(config: CheckpointConfig) -> list[int]:
    """The iterations whose checkpoints a run may start from, the first that is whole; none where it starts afresh.

    That is `--ckpt-step`, else the tracker's; with `--load-fallback` earlier ones follow. Where `--load` and `--save`
    are one folder, a run may be its own successor: one without checkpoints starts afresh, and a checkpoint counts that
    was saved whole in the moment before its tracker.
    Raises ValueError where there is no checkpoint under any other `--load`, or none that was asked for; `DamageError`
    where the only one that may be loaded has no index.
    """
    if config.load is None:
        return []
    directory, step = Path(config.load), config.ckpt_step
    complete = complete_iterations(directory)
    if step is not None and step not in {*complete, *saved_iterations(directory)}:
        there = ", ".join(map(str, complete)) or "none"
        raise ValueError(f"--ckpt-step {step}: {config.load} has no checkpoint of that iteration; there are: {there}")
    try:
        iterations = iterations_to_try(directory, step, fallback=config.load_fallback)
    except DamageError as error:  # of the tracker
        raise DamageError(f"{error}{other_choice(directory)}") from error
    if not iterations:
        if not same_folder(config.save, config.load):
            raise ValueError(f"--load {config.load}: {none_there(directory)}{other_choice(directory)}")
        iterations = sorted({*complete, *saved_iterations(directory)})[-1:]
    if iterations and not set(iterations) & set(complete):
        _refuse_missing(directory, iterations[0])
    return iterations


def _refuse_missing(directory: Path, iteration: int) -> None:
    """Raise `DamageError` for an iteration of which there is no checkpoint."""
    try:
        whole_folder(directory, iteration)
    except DamageError as error:
        raise DamageError(f"{error}{other_choice(directory, iteration)}") from error


def same_folder(one: str | None, other: str | None) -> bool:
    """Whether two names lead to one place; None is no folder."""
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)
