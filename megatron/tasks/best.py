"""The best epoch by its accuracy: its weights beside the run's checkpoints, and its predictions."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from megatron import mpu
from megatron.checkpointing import SaveError, iterations_to_load, read_state, save_checkpoint
from megatron.checkpointing.config import same_folder
from megatron.checkpointing.folders import TRACKER, saved_iterations
from megatron.optimizer.state import OPTIMIZER_STATE
from megatron.tasks.config import FinetuneConfig
from megatron.tasks.predictions import Count, Prediction, count_correct, write_predictions
from megatron.training.run import Run
from megatron.training.state import layout, library_versions, model_signature

_FOLDER = "best"


class Best:
    """Keeps the best of the evaluations that it is shown; all ranks show it the same.

    Weights go to `SAVE/best`, a folder of checkpoints with one in it, without the optimizer's state. A run that goes on
    from its own `--save` goes on with the best that stands there, as far as it is not of later iterations and is one of
    `questions` questions too; where its evaluation comes again, its predictions are written again. Another best is left
    alone, unless it is of the same iteration. `notes` tell of that, and of predictions that only a better epoch would
    write.
    """

    def __init__(self, config: FinetuneConfig, questions: int) -> None:
        save = config.checkpoint.save
        self._folder = None if save is None else os.path.join(save, _FOLDER)
        self._predictions_file = config.task.predictions_file
        self.correct, self._iteration = -1, -1  # right answers of the best, and where it is
        loaded = 0
        if self._folder is not None and same_folder(save, config.checkpoint.load):
            iterations = iterations_to_load(config.checkpoint)
            loaded = iterations[0] if iterations else 0
            if iterations:
                self.correct, self._iteration = _kept(self._folder, loaded, questions)
        there = [] if self._folder is None else saved_iterations(Path(self._folder))
        self._left_alone = {number for number in there if number > loaded or self._iteration < 0}
        self.notes = [
            f"{self._folder}: this run does not go on from the best of iteration {number} there; one that it saves of "
            "the same iteration takes its place"
            for number in sorted(self._left_alone)
        ]
        missing = self._predictions_file is not None and not os.path.exists(self._predictions_file)
        if missing and 0 <= self._iteration < loaded:
            self.notes.append(
                f"--predictions-file {self._predictions_file}: only an epoch that is better than the best so far "
                f"writes it; --eval-only --load {self._folder} writes the scores of that"
            )

    def offer(self, run: Run, epoch: int, predictions: Sequence[Prediction]) -> None:
        """Keep the model as it is now if more is right than in what is kept.

        Collective as `save_checkpoint`. A failure to write is told, and is no reason to stop.
        """
        count = count_correct(predictions)["all"]
        again = run.trainee.state.iteration == self._iteration  # what is kept already
        if count.correct <= self.correct and not again:
            return
        try:
            if self._folder is not None and not again:
                self._save(run, self._folder, epoch, count)
        except SaveError as error:  # on every rank
            run.audience.on_message(f"the best epoch could not be kept: {error}")
            return
        self.correct, self._iteration = max(count.correct, self.correct), run.trainee.state.iteration
        if self._predictions_file is not None and run.world.reports:
            try:
                write_predictions(self._predictions_file, predictions)
            except OSError as error:
                run.audience.on_message(f"the scores of the best epoch could not be written: {error}")

    def _save(self, run: Run, folder: str, epoch: int, count: Count) -> None:
        trainee = run.trainee
        weights = {name: held for name, held in trainee.written().items() if not name.startswith(OPTIMIZER_STATE)}
        state = {
            "model": model_signature(trainee.model),
            "config": dataclasses.asdict(run.config),
            "versions": library_versions(),
            "best": {"iteration": trainee.state.iteration, "epoch": epoch, **count._asdict()},
        }
        save_checkpoint(
            folder,
            trainee.state.iteration,
            weights,
            state,
            trainee.own_tensors(),
            rank=run.world.rank,
            world_size=run.world.size,
            layout=layout(),
            tensor_rank=mpu.get_tensor_model_parallel_rank(),
            keep_last=1,
            left_alone=self._left_alone,
        )
        self._left_alone.discard(trainee.state.iteration)
        run.audience.on_message(f"epoch {epoch} is the best so far, its weights are in {folder}")


def _kept(folder: str, loaded: int, questions: int) -> tuple[int, int]:
    """What the best in `folder` had right, and its iteration; -1 unless it is of the first `loaded`, and comparable."""
    if not (Path(folder) / TRACKER).is_file():
        return -1, -1
    best = read_state(folder).get("best", {})
    if best.get("iteration", loaded + 1) > loaded or best.get("questions") != questions:
        return -1, -1
    return int(best["correct"]), int(best["iteration"])
