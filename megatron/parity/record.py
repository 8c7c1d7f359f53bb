"""What one rank keeps of a short run: losses, every reduced gradient of every iteration, the weights at the end."""

import ast
import contextlib
import dataclasses
import runpy
import symtable
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.mpu import parameter_shardings
from megatron.optimizer import Optimizer, StepResult
from megatron.parity.pieces import Piece, pieces_of
from megatron.training.config import RunConfig
from megatron.training.observers import Metrics, Observer
from megatron.training.state import Trainee

# (config, observers) -> what was trained: `train` of pretrain_gpt.py or of a script like it.
Train = Callable[[RunConfig, Sequence[Observer]], Trainee]


@dataclasses.dataclass
class Record:
    """Of one rank. Losses and norms are told to the reporting rank alone.

    Attributes:
        losses, norms: of each iteration, the norm before clipping.
        evaluations: losses on the validation set.
        gradients: of each iteration what this rank holds of the whole batch's, divided, not clipped.
        weights: what it holds of the weights at the end.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[float] = dataclasses.field(default_factory=list)
    gradients: list[list[Piece]] = dataclasses.field(default_factory=list)
    weights: list[Piece] = dataclasses.field(default_factory=list)


class _Recorder(Observer):
    def __init__(self, record: Record) -> None:
        self._record = record

    def on_log(self, metrics: Metrics) -> None:
        self._record.losses.append(metrics["loss"])
        self._record.norms.append(metrics["grad-norm"])

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        self._record.evaluations.append(metrics["loss"])


@contextlib.contextmanager
def gradients_recorded(record: Record) -> Iterator[None]:
    """Inside the block every step of an optimizer first puts its gradients into `record`."""
    step = Optimizer.step

    def recorded(optimizer: Optimizer, *args: Any, **named: Any) -> StepResult:
        record.gradients.append(pieces_of(optimizer.placed_gradients()))
        return step(optimizer, *args, **named)

    # No part of the library hands gradients out while it trains; they are watched from outside.
    with mock.patch.object(Optimizer, "step", recorded):
        yield


def record_run(train: Train, config: RunConfig) -> Record:
    """Train and record, on the process groups that exist. Called on every rank."""
    record = Record()
    with gradients_recorded(record):
        trainee = train(config, [_Recorder(record)])
    shardings = parameter_shardings(trainee.model)
    named = trainee.model.named_parameters()
    record.weights = pieces_of({name: (parameter, shardings[name]) for name, parameter in named})
    return record


def script_problems(script: str) -> list[str]:
    """A sentence where there is no such file, it is not Python, or it has no `train` for the config of a GPT's run.

    Nothing in it is run.
    """
    if not Path(script).is_file():
        return [f"--script {script}: there is no such file"]
    try:
        text = Path(script).read_bytes()
        names = symtable.symtable(text, script, "exec").get_symbols()  # type: ignore[arg-type]
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        return [f"--script {script}: it cannot be read as Python ({error})"]
    imports_all = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree))
    given = any(name.get_name() == "train" and (name.is_assigned() or name.is_imported()) for name in names)
    if not given and not imports_all:
        return [_without_train(script)]
    other = [name for name in map(_config_of, tree.body) if name not in (None, "RunConfig", "Any")]
    return [f"--script {script}: its train takes a {name}, and runs of a RunConfig are checked here" for name in other]


def _config_of(node: ast.stmt) -> str | None:
    """What kind of config the function `train` says that it takes, None where it does not say."""
    if not isinstance(node, ast.FunctionDef) or node.name != "train" or not node.args.args:
        return None
    kind = node.args.args[0].annotation
    return None if kind is None else ast.unparse(kind).strip("'\"").rpartition(".")[2]


def _without_train(script: str) -> str:
    return f"--script {script}: it has no function train(config, observers)"


def train_of(script: str) -> Train:
    """The function `train` of a training script. ValueError where it has none."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    train: Train | None = runpy.run_path(script).get("train")
    if train is None:
        raise ValueError(_without_train(script))
    return train
