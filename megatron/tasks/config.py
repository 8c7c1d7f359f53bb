"""All flags of fine-tuning: those of a pretraining run that apply, and the task's own."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from megatron.base.compose import combines
from megatron.base.config import Config, choice_problems, flag, flag_fields, flag_name, minimum_problems
from megatron.base.files import file_problem
from megatron.checkpointing import CheckpointConfig, read_state
from megatron.data import DataConfig
from megatron.optimizer.schedule import ScheduleConfig
from megatron.tasks.glue import MNLI, QQP
from megatron.tasks.race import RACE
from megatron.tasks.task import Task
from megatron.training.config import RunConfig, TrainingConfig
from megatron.training.foreign_flags import IGNORED, RENAMED

TASKS: Mapping[str, Task] = {"RACE": RACE, "MNLI": MNLI, "QQP": QQP}

_EACH_EPOCH = "each epoch ends with an evaluation of all of --valid-data"
_SHORTEST = 4  # tokens: three special ones and one of the text that is never cut


@dataclasses.dataclass(frozen=True)
class TaskConfig(Config):
    """What to fine-tune for, on which files, how often."""

    task: str = flag(dataclasses.MISSING, "what the model learns", choices=tuple(TASKS))
    valid_data: tuple[str, ...] = flag(dataclasses.MISSING, "to evaluate on after each epoch; given as --train-data")
    train_data: tuple[str, ...] | None = flag(
        None, "to train on: folders of RACE (RACE/train, or RACE/train/middle RACE/train/high), or .tsv files of GLUE"
    )
    epochs: int | None = flag(None, "times that all of --train-data is trained on; 0 is --eval-only")
    pretrained_checkpoint: str | None = flag(
        None, "folder of a pretrained BERT's checkpoints, from which the encoder is taken; the task's head begins anew"
    )
    keep_last: bool = flag(
        False, "train on the examples that fill no batch at the end of an epoch as well, as a smaller batch"
    )
    eval_only: bool = flag(False, "evaluate the model of --load on --valid-data, and train nothing")
    predictions_file: str | None = flag(
        None, "file of JSON lines for the scores of each question of --valid-data by the best epoch, or by --eval-only"
    )
    skip_malformed_lines: bool = flag(
        False,
        "leave out lines of --train-data of MNLI or QQP that have another number of columns than the first, and tell "
        "how many; in --valid-data they are mistakes all the same",
    )

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing is trained."""
        return self.eval_only or self.epochs == 0

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 0, "epochs")
        if not self.only_evaluates:
            missing = [flag_name(name) for name in ("train_data", "epochs") if getattr(self, name) is None]
            found += [f"{name} is not given: training needs it, --eval-only does not" for name in missing]
        if self.skip_malformed_lines and self.task == "RACE":
            found.append("--skip-malformed-lines: it is for the lines of MNLI and QQP, and RACE's files have none")
        return found

    def input_problems(self) -> list[str]:
        """What is wrong with the pretrained checkpoint, as far as finding it tells, and with the predictions' place."""
        found = []
        if self.predictions_file is not None and (why := file_problem(self.predictions_file)):
            found.append(f"--predictions-file {self.predictions_file}: {why}")
        if self.pretrained_checkpoint is not None:
            try:
                read_state(self.pretrained_checkpoint)
            except ValueError as error:
                found.append(f"--pretrained-checkpoint {error}")
        return found


@dataclasses.dataclass(frozen=True)
class EpochTrainingConfig(TrainingConfig):
    """How much to train on at a time; how long, the epochs say."""

    no_flags = frozenset(
        {
            *("train_iters", "train_samples", "rampup_batch_size", "loss_normalization"),
            *("eval_interval", "eval_iters", "eval_samples"),
        }
    )

    def _length_problems(self) -> list[str]:
        return []  # the number of iterations is known when the examples are read


@dataclasses.dataclass(frozen=True)
class TaskDataConfig(DataConfig):
    """How samples are made and loaded."""

    no_flags = frozenset(field.name for field in flag_fields(DataConfig)) - {"seq_length", "num_workers"}

    def problems(self) -> list[str]:
        return super().problems() + minimum_problems(self, _SHORTEST, "seq_length")

    def input_problems(self) -> list[str]:
        """None: there are no token sets."""
        return []


@dataclasses.dataclass(frozen=True)
class TaskScheduleConfig(ScheduleConfig):
    """How the learning rate goes; raises `ConfigError` with all that is wrong when it is made."""

    whole_training: ClassVar[str | None] = "the iterations of --epochs, which are"

    lr: float = flag(2e-5, "largest learning rate, reached at the end of the warm-up")


@dataclasses.dataclass(frozen=True)
class TaskCheckpointConfig(CheckpointConfig):
    """Folders and interval of checkpoints; raises `ConfigError` with all that is wrong when it is made."""

    keep_last_checkpoints: int | None = flag(None, "checkpoints that are kept, the newest; all of them by default")

    no_flags = frozenset({"keep_last"})  # which is about batches here

    def problems(self) -> list[str]:
        return super().problems() + minimum_problems(self, 1, "keep_last_checkpoints")


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Fine-tune a BERT on RACE, MNLI or QQP, or evaluate it; --task LAMBADA --help tells of evaluating a GPT."""

    training: EpochTrainingConfig
    data: TaskDataConfig
    schedule: TaskScheduleConfig
    checkpoint: TaskCheckpointConfig
    task: TaskConfig

    ignored_flags: ClassVar[Mapping[str, str]] = {
        **IGNORED,
        "eval-interval VALUE": _EACH_EPOCH,
        "eval-iters VALUE": _EACH_EPOCH,
    }
    renamed_flags: ClassVar[Mapping[str, str]] = {
        **RENAMED,
        "train-iters": "--epochs",
        "train-samples": "--epochs",
        "data-path": "--train-data with --valid-data",
    }

    @property
    def chosen(self) -> Task:
        """The task."""
        return TASKS[self.task.task]

    @property
    def most_counted(self) -> int:
        """What a sample adds to the number that divides the loss: it has one answer."""
        return 1

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample."""
        return self.data.seq_length * self.chosen.sequences

    @combines("task", "checkpoint")
    def _evaluation_problems(self, world_size: int) -> list[str]:
        if not self.task.only_evaluates or self.checkpoint.load is not None:
            return []
        return ["--load is not given: --eval-only needs the folder of a fine-tuned model's checkpoints"]
