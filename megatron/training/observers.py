"""Those who watch a run: the console, TensorBoard, a file of JSON lines, a progress bar. All see the same numbers."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.base.config import Config, choice_problems, flag, minimum_problems


@dataclasses.dataclass(frozen=True)
class LoggingConfig(Config):
    """Where progress is written."""

    log_interval: int = flag(100, "iterations between log lines")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard scalars; none are written if not given")
    metrics_file: str | None = flag(None, "file to which each log line is appended as one JSON object")
    progress_bar: bool = flag(False, "show a progress bar")
    timing_log_level: int = flag(
        0,
        "1 logs where the time of an iteration goes, the least and the most of all ranks; "
        "on a GPU measuring it takes some time",
        choices=(0, 1),
    )

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "log_interval")
        if self.tensorboard_dir == "":
            found.append("--tensorboard-dir '': it must be a folder")
        return found

    def input_problems(self) -> list[str]:
        """Whether what is in the way of the outputs can be written over or into."""
        found = []
        if self.metrics_file is not None and os.path.isdir(self.metrics_file):
            found.append(f"--metrics-file {self.metrics_file}: it is a folder and cannot be written")
        if self.tensorboard_dir is not None and os.path.isfile(self.tensorboard_dir):
            found.append(f"--tensorboard-dir {self.tensorboard_dir}: it is a file and cannot be written into")
        return found


Metrics = Mapping[str, float | int]


class Observer:
    """Watches a run on the rank that reports. Every method may be left as it is."""

    def on_start(self, text: str) -> None:
        """Before the first iteration, with a description of the run."""

    def on_iteration(self, iteration: int, train_iters: int) -> None:
        """After every iteration."""

    def on_log(self, metrics: Metrics) -> None:
        """Once a log interval, with its numbers by name; "iteration" among them."""

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        """After an evaluation on `split` ("validation" or "test")."""

    def on_message(self, text: str) -> None:
        """Something to be told, such as a checkpoint saved."""

    def on_end(self) -> None:
        """When the run ends, by an error too."""


def format_metrics(metrics: Metrics) -> str:
    """`name value | name value`: whole numbers plainly, others to six digits."""
    return " | ".join(f"{k} {v}" if isinstance(v, int) else f"{k} {v:.6g}" for k, v in metrics.items())


class Console(Observer):
    """Log lines on standard output, above the progress bar where there is one."""

    def _say(self, text: str) -> None:
        tqdm.write(f"{text}\n", file=sys.stdout, end="")  # at once: see `say`
        sys.stdout.flush()

    def on_start(self, text: str) -> None:
        self._say(text)

    def on_log(self, metrics: Metrics) -> None:
        self._say(format_metrics(metrics))

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        self._say(f"{split} | {format_metrics(metrics)}")

    def on_message(self, text: str) -> None:
        self._say(text)


class ProgressBar(Observer):
    """A bar of iterations on standard error; drawn rarely where that is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_iteration(self, iteration: int, train_iters: int) -> None:
        if self._bar is None:
            every = 0.5 if sys.stderr.isatty() else 15.0  # seconds
            self._bar = tqdm(total=train_iters, initial=iteration - 1, desc="pretraining", unit="it", mininterval=every)
        self._bar.update()

    def on_end(self) -> None:
        if self._bar is not None:
            self._bar.close()


class JsonLines(Observer):
    """Each log line and evaluation as one JSON object, appended to a file."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in on_end

    def _write(self, record: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def on_log(self, metrics: Metrics) -> None:
        self._write({"split": "train", **metrics})

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        self._write({"split": split, **metrics})

    def on_end(self) -> None:
        self._stream.close()


class TensorBoard(Observer):
    """Every number of the log line as a scalar of the same name, evaluations below "validation/" and "test/"."""

    def __init__(self, directory: str) -> None:
        # Imported here: it takes seconds, and most ranks never write.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory)

    def _write(self, prefix: str, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if name != "iteration":
                self._writer.add_scalar(prefix + name, value, metrics["iteration"])

    def on_start(self, text: str) -> None:
        self._writer.add_text("run", text)

    def on_log(self, metrics: Metrics) -> None:
        self._write("", metrics)

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        self._write(f"{split}/", metrics)

    def on_end(self) -> None:
        self._writer.close()


class Audience(Observer):
    """Several observers as one; on a rank that does not report there are none."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)

    def on_start(self, text: str) -> None:
        for observer in self._observers:
            observer.on_start(text)

    def on_iteration(self, iteration: int, train_iters: int) -> None:
        for observer in self._observers:
            observer.on_iteration(iteration, train_iters)

    def on_log(self, metrics: Metrics) -> None:
        for observer in self._observers:
            observer.on_log(metrics)

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        for observer in self._observers:
            observer.on_evaluation(split, metrics)

    def on_message(self, text: str) -> None:
        for observer in self._observers:
            observer.on_message(text)

    def on_end(self) -> None:
        for observer in self._observers:
            observer.on_end()


def configured_observers(config: LoggingConfig) -> list[Observer]:
    """The observers that the flags ask for; the console is always among them."""
    observers: list[Observer] = [Console()]
    if config.progress_bar:
        observers.append(ProgressBar())
    if config.metrics_file is not None:
        observers.append(JsonLines(config.metrics_file))
    if config.tensorboard_dir is not None:
        observers.append(TensorBoard(config.tensorboard_dir))
    return observers
