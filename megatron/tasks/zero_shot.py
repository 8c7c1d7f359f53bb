"""Evaluate a GPT as it is, without fine-tuning: WikiText-103 and LAMBADA, at any layout."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from megatron.base.config import Config, choice_problems, flag, minimum_problems
from megatron.base.console import say
from megatron.tasks.evaluation import Evaluation
from megatron.tasks.lambada import lambada, read_passages
from megatron.tasks.measures import Progress, measured
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.trained import Trained, TrainedRequest, opened
from megatron.tasks.wikitext import read_text, wikitext
from megatron.tokenizer import Tokenizer
from megatron.training.failure import mistakes
from megatron.training.foreign_flags import IGNORED
from megatron.training.memory import memory_needed

ZERO_SHOT_TASKS = ("WIKITEXT103", "LAMBADA")


@dataclasses.dataclass(frozen=True)
class ZeroShotConfig(Config):
    """What the model is evaluated on, and how."""

    task: str = flag(dataclasses.MISSING, "what the model is evaluated on", choices=ZERO_SHOT_TASKS)
    valid_data: tuple[str, ...] = flag(
        dataclasses.MISSING, "the file: WikiText-103's wiki.test.tokens, or LAMBADA's lines of {\"text\": ...}"
    )
    seq_length: int | None = flag(None, "tokens that the model reads at once at most; all that it can if not given")
    overlapping_eval: int = flag(
        32, "WIKITEXT103: tokens by which a window is further than the one before; --seq-length for no overlap"
    )
    strict_lambada: bool = flag(
        True, "LAMBADA: all subwords of the last word have to be right, not only the last subword"
    )
    micro_batch_size: int = flag(
        8, "windows or passages that the model reads at the same time", aliases=("batch-size",)
    )
    log_interval: int = flag(10, "batches of a data-parallel rank between two lines on how far it is")

    def problems(self) -> list[str]:
        names = ("seq_length", "overlapping_eval", "micro_batch_size", "log_interval")
        found = choice_problems(self) + minimum_problems(self, 1, *names)
        if len(self.valid_data) != 1:
            found.append(f"--valid-data {' '.join(self.valid_data)}: one file is evaluated at a time")
        return found

    @property
    def path(self) -> str:
        """The file."""
        return self.valid_data[0]

    def input_problems(self) -> list[str]:
        """Whether the file is there."""
        return [] if Path(self.path).is_file() else [f"--valid-data {self.path}: there is no such file"]


@dataclasses.dataclass(frozen=True)
class ZeroShotRequest(TrainedRequest):
    """Evaluate a GPT on WikiText-103 or LAMBADA."""

    evaluation: ZeroShotConfig

    data_parallel: ClassVar[bool] = True
    ignored_flags = {
        **IGNORED,
        **{name: why for name, why in TrainedRequest.ignored_flags.items() if not name.startswith("seq-length")},
        "seed VALUE": "nothing is drawn",
    }


def window_length(asked: ZeroShotConfig, context: int) -> int:
    """The tokens that the model, which can read `context`, is to read at once at most.

    Raises ValueError where they are more, or windows would leave tokens out between them.
    """
    length = context if asked.seq_length is None else asked.seq_length
    if length > context:
        raise ValueError(f"--seq-length {length}: the model reads {context} tokens at most")
    if asked.task == "WIKITEXT103" and asked.overlapping_eval > length:
        raise ValueError(
            f"--overlapping-eval {asked.overlapping_eval}: windows of {length} tokens would leave some out between them"
        )
    return length


def reader(asked: ZeroShotConfig) -> Callable[[Tokenizer, int], Evaluation]:
    """Read the file; what makes the evaluation of it, once tokenizer and length of a window are known."""
    if asked.task == "LAMBADA":
        passages = read_passages(asked.path)
        return lambda tokens, length: lambada(asked.path, passages, tokens, length, strict=asked.strict_lambada)
    text = read_text(asked.path)
    return lambda tokens, length: wikitext(asked.path, text, tokens, length, asked.overlapping_eval)


def evaluate(request: ZeroShotRequest) -> dict[str, float]:
    """Evaluate and tell the results, which are returned by name on every rank. Mistakes raise `ConfigError`."""
    asked = request.evaluation
    with mistakes():
        make = reader(asked)
    with opened(request) as trained:
        with mistakes():
            evaluation = make(trained.tokenizer, window_length(asked, trained.model.config.max_position_embeddings))
        with memory_needed(f"--micro-batch-size {asked.micro_batch_size}"):
            values = measured(
                SplitGPT(trained.model, trained.world.device),
                evaluation.windows,
                asked.micro_batch_size,
                evaluation.measure,
                _progress(trained, asked.log_interval),
            )
        figures = evaluation.figures(values)
        if trained.world.reports:
            say("\n".join(figures.lines))
        return figures.numbers


def _progress(trained: Trained, interval: int) -> Progress:
    def tell(done: int, batches: int) -> None:
        if trained.world.reports and done % interval == 0:
            say(f"batch {done} of {batches}")

    return tell
