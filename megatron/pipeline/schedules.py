"""Schedules as data: GPipe, 1F1B and interleaved 1F1B, and the closed forms of their bubble and their memory.

Every one of them is two orders, of forward and of backward passes, that are the same on all ranks, and a number of
forward passes before the first backward pass, which is not. A chunk meets its micro-batches in the order 0, 1, 2, ...
in all of them, so gradients are added in the same order whatever the schedule.
"""

from megatron.base.complaints import raise_joined
from megatron.base.words import micro_batches
from megatron.pipeline.actions import Action, Kind, Schedule
from megatron.pipeline.nearest import nearest_words

SCHEDULES = ("1f1b", "gpipe")


def micro_batch_problems(p: int, v: int, m: int) -> list[str]:
    """One sentence where `m` micro-batches cannot be scheduled over `p` ranks of `v` chunks."""
    if v > 1 and m % p:
        multiples = nearest_words(m, lambda n: n % p == 0, m + p)
        return [
            f"{micro_batches(m)}: with virtual stages their number must be a multiple of "
            f"--pipeline-model-parallel-size {p}{multiples}"
        ]
    return []


def build_schedule(name: str, p: int, m: int, v: int = 1, *, forward_only: bool = False) -> Schedule:
    """The schedule `name` of `m` micro-batches over `p` pipeline ranks with `v` chunks each.

    Args:
        name: "1f1b" runs a backward pass as soon as there is one, and is interleaved (arXiv:2104.04473, section 2.2)
            where `v` > 1; "gpipe" runs all forward passes first. With `p` = 1, "1f1b" is what is done without a
            pipeline: each forward pass followed by its backward pass.
        forward_only: leave out the backward passes.

    Raises ConfigError where `m` is not a multiple of `p` though `v` > 1, ValueError for other sizes that make no
    pipeline.
    """
    if name not in SCHEDULES or min(p, v, m) < 1 or p == 1 < v:
        raise ValueError(
            f"schedule {name!r} of {m} micro-batches over {p} ranks of {v} chunks: accepted are "
            f"{' and '.join(SCHEDULES)}, numbers from 1, and more than one chunk only with more than one rank"
        )
    raise_joined(micro_batch_problems(p, v, m))
    forwards, backwards = _order("forward", p, v, m), _order("backward", p, v, m)
    if forward_only:
        return Schedule(p, v, m, (tuple(forwards),) * p, forward_only=True)
    warm_ups = [warm_up(name, p, v, m, rank) for rank in range(p)]
    return Schedule(p, v, m, tuple(_alternating(forwards, backwards, n) for n in warm_ups))


def warm_up(name: str, p: int, v: int, m: int, rank: int) -> int:
    """Forward passes of `rank` before it begins to alternate, each followed by a backward pass.

    In 1F1B one for each rank behind it. Interleaved it is two for each rank behind it, as a micro-batch group passes
    all ranks twice before the first gradient can come back (once up to the last rank, once on its way down), and one
    round of `p` for each chunk but the last.
    """
    if name == "gpipe":
        return m * v
    behind = p - rank - 1
    return min(m * v, behind if v == 1 else 2 * behind + (v - 1) * p)


def peak_in_flight(name: str, p: int, v: int, m: int, rank: int) -> int:
    """Most forward passes (of one chunk) whose activations `rank` holds at one time: the warm-up and one more."""
    return min(m * v, warm_up(name, p, v, m, rank) + 1)


def bubble(p: int, v: int, m: int) -> float:
    """Time that a rank idles over the time that it works, all stages being equal: `(p - 1) / (v m)`.

    Of every schedule here (arXiv:2104.04473, section 2.2); `simulate.py` gives it for stages that differ.
    """
    return (p - 1) / (v * m)


def _order(kind: Kind, p: int, v: int, m: int) -> list[Action]:
    """Groups of `p` micro-batches go through all chunks, forwards or backwards, before the next group begins."""
    chunks = range(v) if kind == "forward" else range(v - 1, -1, -1)
    return [
        Action(kind, micro_batch, chunk)
        for first in range(0, m, p)
        for chunk in chunks
        for micro_batch in range(first, min(first + p, m))
    ]


def _alternating(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    steady = len(forwards) - warm_up
    turns = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return (*forwards[:warm_up], *turns, *backwards[steady:])
