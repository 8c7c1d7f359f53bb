"""Draws a schedule and tells its bubble and its memory: `python -m megatron.pipeline.show --pp 4 --microbatches 8`."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from fractions import Fraction

from megatron.base.complaints import raise_joined
from megatron.base.files import file_problem
from megatron.base.words import counted, micro_batches
from megatron.pipeline.actions import Action, Schedule
from megatron.pipeline.communication import programs
from megatron.pipeline.grid import column_time, common_time, grid
from megatron.pipeline.picture import draw
from megatron.pipeline.schedules import SCHEDULES, bubble, build_schedule
from megatron.pipeline.simulate import Timeline, simulate
from megatron.pipeline.validate import peak_in_flight


def _duration(text: str) -> Fraction:
    """A number as it is written: 0.1 is a tenth, so that times are added exactly and the columns of the grid fit."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text}: it must be a number") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.pipeline.show",
        description="Draws who computes what when: F3 is the forward pass of micro-batch 3, B3 its backward pass; "
        "F3a and F3b are those of the chunks of a rank that has several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--pp", "--pipeline-model-parallel-size", type=int, default=4, help="pipeline ranks (p)")
    parser.add_argument("--vpp", type=int, default=1, help="chunks (virtual stages) of each rank (v)")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of an iteration (m)")
    parser.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0], help="the order of the passes")
    parser.add_argument("--forward-only", action="store_true", help="no backward passes, as in evaluation")
    parser.add_argument("--forward-time", type=_duration, default=Fraction(1), help="time of a forward pass")
    parser.add_argument("--backward-time", type=_duration, default=Fraction(2), help="time of a backward pass")
    parser.add_argument("--transfer-time", type=_duration, default=Fraction(0), help="time from a rank to the next one")
    parser.add_argument("--program", type=int, metavar="RANK", help="list what this rank computes, sends and receives")
    parser.add_argument("--png", metavar="FILE", help="draw a picture too; needs matplotlib (pip install matplotlib)")
    return parser


def title(schedule: Schedule, name: str) -> str:
    """One line that says what is drawn."""
    words = {"1f1b": "1F1B" if schedule.virtual_size == 1 else "interleaved 1F1B", "gpipe": "GPipe"}[name]
    chunks = f" of {schedule.virtual_size} chunks" if schedule.virtual_size > 1 else ""
    ranks = counted(schedule.pipeline_size, "rank")
    passes = "forward passes of " if schedule.forward_only else ""
    return f"{words}, {ranks}{chunks}, {passes}{micro_batches(schedule.num_micro_batches)}"


def summary(timeline: Timeline, unit: Fraction) -> str:
    """The bubble, beside its closed form, and for each rank its peak in flight and its idle time.

    `unit` is what a time of 1 in the timeline stands for.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    closed = bubble(schedule.pipeline_size, schedule.virtual_size, schedule.num_micro_batches)
    lines = [
        f"time {float(makespan * unit):g}, bubble {timeline.bubble:.2%} of the ideal time",
        f"equal stages without transfers have a bubble of (p - 1)/(v m) = {closed:.2%}",
        "",
        "rank  forward passes held at most  idle",
    ]
    for rank, actions in enumerate(schedule.actions):
        held = 0 if schedule.forward_only else peak_in_flight(actions)
        lines.append(f"{rank:4}  {held:27}  {float((makespan - timeline.busy(rank)) * unit):g}")
    return "\n".join(lines)


def program_text(schedule: Schedule, rank: int) -> str:
    """What one rank does, a line for each pass and each message; what is exchanged at one time has one `-`."""
    lines = []
    for instruction in programs(schedule, [rank])[0]:
        if isinstance(instruction, Action):
            lines.append(str(instruction))
        else:
            parts = [f"send {m}" for m in instruction.sends] + [f"receive {m}" for m in instruction.receives]
            lines.append("  - " + "\n    ".join(parts))
    return "\n".join(lines)


def _option_problems(options: argparse.Namespace) -> list[str]:
    """What is wrong with the flags that nobody else checks."""
    sizes = {name: getattr(options, name) for name in ("pp", "vpp", "microbatches")}
    found = [f"--{name} {size}: it must be at least 1" for name, size in sizes.items() if size < 1]
    if options.pp == 1 < options.vpp:
        found.append(f"--vpp {options.vpp}: with --pp 1 it must be 1")
    for name, word in (("forward", "above"), ("backward", "above"), ("transfer", "at least")):
        time = getattr(options, f"{name}_time")
        if time < 0 or (time == 0 and word == "above"):
            found.append(f"--{name}-time {time}: it must be {word} 0")
    if options.program is not None and not 0 <= options.program < options.pp > 0:
        found.append(f"--program {options.program}: it must be a rank, from 0 to {options.pp - 1}")
    if options.png is not None and (why := file_problem(options.png)):
        found.append(f"--png {options.png}: {why}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the grid and the figures of the schedule that the flags describe."""
    parser = _parser()
    options = parser.parse_args(argv)
    name, p, v, m = options.schedule, options.pp, options.vpp, options.microbatches
    times = options.forward_time, options.backward_time, options.transfer_time
    try:
        raise_joined(_option_problems(options))
        schedule = build_schedule(name, p, m, v, forward_only=options.forward_only)
        heading = title(schedule, name)
        unit = common_time(*times)
        timeline = simulate(schedule, *(int(time / unit) for time in times))
        if options.png:
            draw(timeline, options.png, heading, unit)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    column = column_time(*times)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    drawn = grid(timeline, column / unit, width)
    print(f"{heading}; a column is {float(column):g}\n\n{drawn}\n\n{summary(timeline, unit)}")
    if options.program is not None:
        print(f"\nrank {options.program}\n{program_text(schedule, options.program)}")


if __name__ == "__main__":
    main()
