"""Whole pretraining runs for tests: a tiny GPT on synthetic documents, and what came of it on every rank."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron import mpu
from megatron.parity.pieces import Piece, as_array, pieces_of
from megatron.parity.pieces import assemble as assemble_pieces
from megatron.parity.synthetic import EOD, VOCAB_SIZE, write_documents
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.observers import Metrics, Observer
from megatron.training.state import Trainee

__all__ = ["EOD", "VOCAB_SIZE", "Outcome", "Recorder", "write_documents"]

# Two layers, four heads; the vocabulary needs padding at every layout.
TINY = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "make-vocab-size-divisible-by": 8,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": VOCAB_SIZE,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 20,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-iters": 2,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "split": "80,20,0",
    "eval-iters": 2,
    "eval-interval": 10,
    "log-interval": 1,
    "num-workers": 0,
    "distributed-backend": "gloo",
}


def flags(data_path: str | Path, **changes: Any) -> list[str]:
    """The command line of a tiny run; `changes`: flags with `_` for `-`, True for a switch, None to leave one out."""
    chosen = TINY | {"data-path": str(data_path)} | {name.replace("_", "-"): v for name, v in changes.items()}
    words: list[str] = []
    for name, value in chosen.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


class Recorder(Observer):
    """Keeps every log line, evaluation and message."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_log(self, metrics: Metrics) -> None:
        self.steps.append(dict(metrics))

    def on_evaluation(self, split: str, metrics: Metrics) -> None:
        self.evaluations.append(dict(metrics))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left on one rank. Steps, evaluations and messages are seen by the reporting rank alone."""

    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    messages: list[str]
    pieces: list[Piece]
    local: dict[str, np.ndarray]
    rng: dict[str, np.ndarray]
    progress: dict[str, Any]  # counters, and the optimizer's plain state

    def series(self, name: str) -> list[float]:
        """One number of the log line, by iteration."""
        return [step[name] for step in self.steps]


def reporting(outcomes: Sequence[Outcome]) -> Outcome:
    """That of the one rank which tells how the run goes, or rank 0's where nothing was told."""
    told = [outcome for outcome in outcomes if outcome.steps or outcome.evaluations or outcome.messages]
    assert len(told) <= 1, "several ranks report"
    return told[0] if told else outcomes[0]


def outcome_of(trainee: Trainee, recorder: Recorder) -> Outcome:
    """What a run left on this rank."""
    local = {name: as_array(tensor) for name, (tensor, _) in trainee.tensors().items()}
    rng = {name: state.numpy().copy() for name, state in mpu.rng_state().items()}
    progress = {"run": dataclasses.asdict(trainee.state), "optimizer": trainee.optimizer.state()}
    told = (recorder.steps, recorder.evaluations, recorder.messages)
    return Outcome(*told, pieces_of(trainee.tensors()), local, rng, progress)


def run_pretrain(rank: int, world_size: int, words: Sequence[str]) -> Outcome:
    """Pretrain by `words` on the ranks of the harness (`rank` of `world_size`)."""
    recorder = Recorder()
    config = parse_composed(RunConfig, words, world_size=world_size)
    return outcome_of(pretrain_gpt.train(config, [recorder]), recorder)


def complaints(
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    main: Callable[[Sequence[str]], None] = pretrain_gpt.main,
) -> list[str]:
    """The sentences of a run by `main` that must end with exit code 2 and without a traceback."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return [line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")]


def assemble(outcomes: Iterable[Outcome]) -> dict[str, torch.Tensor]:
    """The global tensors from the pieces of all ranks; fails where an element is missing or replicas differ."""
    whole = assemble_pieces(piece for outcome in outcomes for piece in outcome.pieces)
    assert not whole.missing, f"no rank holds all of {whole.missing}"
    different = [name for name, apart in whole.apart.items() if apart > 0]
    assert not different, f"replicas of {different} differ"
    return whole.tensors
