"""Where a run saves and loads its checkpoints, how often, and which one it starts from."""

import dataclasses
import logging
import os
from pathlib import Path

from megatron.base.config import Config, flag, minimum_problems
from megatron.checkpointing.folders import TRACKER, saved_iterations, tracked_iteration, whole_folder

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Config):
    """Folders and interval of checkpoints; raises `ConfigError` with all that is wrong when it is made."""

    save: str | None = flag(None, "Folder to which checkpoints are saved; none are if not given.")
    load: str | None = flag(None, "Folder from whose latest checkpoint the run starts.")
    save_interval: int | None = flag(None, "Iterations between checkpoints; one at the end of the run in any case.")

    def problems(self) -> list[str]:
        """One sentence for each contradiction and each folder that cannot be one."""
        found = minimum_problems(self, 1, "save_interval")
        if self.save_interval is not None and self.save is None:
            found.append(f"--save-interval {self.save_interval}: it needs --save, the folder to save to")
        for name, folder in (("--save", self.save), ("--load", self.load)):
            if folder is not None and (not folder or os.path.exists(folder) and not os.path.isdir(folder)):
                found.append(f"{name} {folder!r}: it must be a folder")
        return found


def iteration_to_load(config: CheckpointConfig) -> int | None:
    """The iteration of the checkpoint that a run starts from, None where it starts afresh.

    That is the tracker's. Where `--load` and `--save` are one folder, a run may be its own successor, and one without
    checkpoints starts afresh; a checkpoint that was saved whole in the moment before the tracker was written counts.
    Both are said in a log line. Raises ValueError where there is no checkpoint under any other `--load`.
    """
    if config.load is None:
        return None
    directory = Path(config.load)
    tracked = tracked_iteration(directory)
    if tracked is not None:
        whole_folder(directory, tracked)
        return tracked
    if config.save is None or os.path.realpath(config.save) != os.path.realpath(config.load):
        raise ValueError(f"--load {config.load}: there is no checkpoint in it, for there is no {TRACKER}")
    return _untracked(directory)


def _untracked(directory: Path) -> int | None:
    saved = saved_iterations(directory)
    if not saved:
        _logger.warning("--load %s: there is no checkpoint yet, the run starts afresh", directory)
        return None
    whole_folder(directory, saved[-1])
    _logger.warning("--load %s: there is no %s, the run starts from iteration %d", directory, TRACKER, saved[-1])
    return saved[-1]
