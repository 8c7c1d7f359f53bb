"""Which checkpoint a run starts from, and where to turn when it is damaged."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.folders import complete_iterations, tracked_iteration

_logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")


def iterations_to_try(
    directory: str | os.PathLike[str], step: int | None = None, *, fallback: bool = False
) -> list[int]:
    """The iterations to load from, the first that is whole; none where there is nothing to load.

    Args:
        directory: where the folders `iter_NNNNNNN` and the tracker lie.
        step: the iteration that is asked for; the tracker's by default.
        fallback: whether earlier ones may be loaded instead, the newest first. All of them where the tracker is broken
            or missing: later ones than the tracker's are of a run that was turned back.

    Raises `DamageError` where the tracker is broken and there is nothing to fall back to.
    """
    found = complete_iterations(Path(directory))[::-1] if fallback else []
    try:
        first = tracked_iteration(Path(directory)) if step is None else step
    except DamageError as error:
        if not found:
            raise
        _logger.warning("%s", error)
        first = None
    return found if first is None else [first, *(number for number in found if number < first)]


def load_first_whole(iterations: Sequence[int], load: Callable[[int], Loaded]) -> tuple[Loaded, list[str]]:
    """Call `load` with one iteration after another until it raises no `DamageError`.

    Returns what it returned, and a sentence for each checkpoint that was left out. `load` is collective where several
    ranks load, and raises on all of them alike, as `load_checkpoint` does. Raises `DamageError` with all that was found
    where none is whole.
    """
    damage: list[str] = []
    for iteration in iterations:
        try:
            return load(iteration), damage
        except DamageError as error:
            damage.append(f"iteration {iteration} is not whole and is left out: {error}")
            last = error
    raise DamageError("; ".join(damage) if len(damage) > 1 else str(last)) from last


def other_choice(directory: str | os.PathLike[str], iteration: int | None = None) -> str:
    """Half a sentence for the one whose checkpoint of `iteration` is damaged: what else there is; empty if nothing.

    None where it is not even known which iteration that is.
    """
    earlier = [number for number in complete_iterations(Path(directory)) if iteration is None or number < iteration]
    return f"; --load-fallback goes on from an earlier one, such as that of iteration {earlier[-1]}" if earlier else ""
