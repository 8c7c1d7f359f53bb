"""Pipeline parallelism: which stage holds what, who does what when, who sends what to whom; all of it plain data.

Needs no torch. `simulate.py` gives the time of a schedule, `show.py` draws it. `executor.py` runs it, with torch, and
is imported by its own name.
"""

from megatron.pipeline.actions import Action, Exchange, Message, Program, Schedule
from megatron.pipeline.communication import input_of, output_of, programs
from megatron.pipeline.config import PipelineConfig
from megatron.pipeline.schedules import SCHEDULES, bubble, build_schedule, peak_in_flight
from megatron.pipeline.stages import LayerSplit, Stage, head_cost
from megatron.pipeline.validate import program_problems, schedule_problems

__all__ = [
    "SCHEDULES",
    "Action",
    "Exchange",
    "LayerSplit",
    "Message",
    "PipelineConfig",
    "Program",
    "Schedule",
    "Stage",
    "bubble",
    "build_schedule",
    "head_cost",
    "input_of",
    "output_of",
    "peak_in_flight",
    "program_problems",
    "programs",
    "schedule_problems",
]
