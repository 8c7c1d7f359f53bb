"""Whole fine-tuning runs for tests: a tiny BERT on a task's files, and what came of it on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.tasks.config import FinetuneConfig
from megatron.tasks.finetune import finetune
from megatron.training.arguments import parse_composed
from tests.harness.runs import Outcome, Recorder, outcome_of

# Two layers, four heads; the vocabulary needs padding at every layout.
TINY = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "make-vocab-size-divisible-by": 8,
    "tokenizer-type": "BertWordPieceLowerCase",
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "epochs": 2,
    "lr": 1e-3,
    "lr-warmup-fraction": 0.1,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "log-interval": 1,
    "num-workers": 0,
    "distributed-backend": "gloo",
}


def task_flags(task: str, folder: Path, /, **changes: Any) -> list[str]:
    """The command line of a tiny run on `folder`'s vocab.txt, train and dev; `changes` as those of `runs.flags`."""
    suffix = "" if task == "RACE" else ".tsv"
    files = {"train-data": folder / f"train{suffix}", "valid-data": folder / f"dev{suffix}"}
    chosen = {"task": task, "vocab-file": folder / "vocab.txt", **files, **TINY}
    words: list[str] = []
    for name, value in (chosen | {name.replace("_", "-"): v for name, v in changes.items()}).items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def run_finetune(rank: int, world_size: int, words: Sequence[str]) -> Outcome:
    """Fine-tune by `words` on the ranks of the harness (`rank` of `world_size`)."""
    recorder = Recorder()
    config = parse_composed(FinetuneConfig, words, world_size=world_size)
    return outcome_of(finetune(config, [recorder]), recorder)
