"""The loop in which all ranks of a served model do what the first one says."""

from typing import Any

from megatron.tasks.control import Control
from megatron.tasks.generation import Continuations, Prompt
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.serving.schedule import Scheduler


def serve_commands(texts: Continuations, control: Control, scheduler: Scheduler | None) -> None:
    """Continue texts until the scheduler, which the first rank has, is closed. Collective.

    Collectives: two small broadcasts a step, and those of `Continuations.step`.
    """
    try:
        while (told := control.share(None if scheduler is None else scheduler.command(texts.room))) is not None:
            texts.drop(told["drop"])
            chosen = texts.step({number: _prompt(plain) for number, plain in told["begin"]})
            if scheduler is not None:
                scheduler.heard(chosen)
    finally:
        if scheduler is not None:
            scheduler.close()
            scheduler.fail()


def _prompt(plain: dict[str, Any]) -> Prompt:
    made = {"sampling": SamplingConfig(**plain["sampling"]), "seed": tuple(plain["seed"])}
    return Prompt(**plain | made)
