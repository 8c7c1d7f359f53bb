"""A timeline drawn in text: a line for each rank, time to the right."""

import math
from fractions import Fraction

from megatron.pipeline.actions import Action
from megatron.pipeline.simulate import Timeline

_FINEST = 8  # columns of the shortest pass, at most


def label(action: Action, v: int) -> str:
    """`F3` for the forward pass of micro-batch 3, `B3` for its backward pass; `F3b` in the second of `v` chunks."""
    chunk = chr(ord("a") + action.chunk) if v <= 26 else f".{action.chunk}"
    return f"{action.kind[0].upper()}{action.micro_batch}{chunk if v > 1 else ''}"


def common_time(*times: Fraction) -> Fraction:
    """The longest time that goes into all `times` (those above 0) without a remainder."""
    given = [time for time in times if time > 0]
    scale = math.lcm(*(time.denominator for time in given))
    return Fraction(math.gcd(*(int(time * scale) for time in given)), scale)


def column_time(*times: Fraction) -> Fraction:
    """The time of one column: the common time, or an eighth of the shortest of `times` where it is less."""
    return max(common_time(*times), min(time for time in times if time > 0) / _FINEST)


def grid(timeline: Timeline, column: Fraction, width: int | None = None) -> str:
    """The timeline in text: each pass over as many columns of time as it takes, `.` where the rank waits.

    Starts and ends are rounded to columns. Lines longer than `width` characters go on in a further block.
    """
    schedule = timeline.schedule
    size = max(len(label(action, schedule.virtual_size)) for actions in schedule.actions for action in actions)
    rows = [_cells(timeline, rank, column, size) for rank in range(schedule.pipeline_size)]
    names = [f"rank {rank:{len(str(schedule.pipeline_size - 1))}} | " for rank in range(schedule.pipeline_size)]
    columns = max(map(len, rows))
    fitting = columns if width is None else max(1, (width - len(names[0])) // (size + 1))
    blocks = [
        "\n".join(
            (name + "".join(row[first : first + fitting])).rstrip() for name, row in zip(names, rows, strict=True)
        )
        for first in range(0, columns, fitting)
    ]
    return "\n\n".join(blocks)


def _cells(timeline: Timeline, rank: int, column: Fraction, size: int) -> list[str]:
    """The line of one rank in pieces of one column: `size` characters and one that parts them, a pass filled with -."""
    cells: list[str] = []
    over, under = Fraction(column).as_integer_ratio()
    actions = timeline.schedule.actions[rank]
    for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
        first, last = (int((2 * time * under + over) // (2 * over)) for time in (start, end))
        cells += [".".ljust(size + 1)] * (first - len(cells))
        text, length = label(action, timeline.schedule.virtual_size), (last - first) * (size + 1) - 1
        drawn = text.ljust(length, " " if last - first == 1 else "-") + " "
        cells += [drawn[at : at + size + 1] for at in range(0, length, size + 1)]
    return cells
