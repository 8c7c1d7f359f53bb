"""What is in a checkpoint, whether it is whole, how two differ: `python tools/inspect_checkpoint.py DIR [--verify]`.

DIR is the folder of a run, with `latest_checkpointed_iteration.txt`; --ckpt-step chooses another checkpoint than the
latest. Files, sizes and the cover of every tensor are always checked; with --verify every byte is read and compared
with its checksum. --diff OTHER compares all tensors and values with those of another run's checkpoint, or of the same
run's at --diff-step, and lists what differs in place of all tensors; what belongs to one rank alone, such as its random
generators, only where both were saved at one layout.

Exit code 0; 1 where something is damaged or, with --diff, different; 2 for mistakes.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.base.config import Config, flag, minimum_problems
from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.folders import complete_iterations, leftovers
from megatron.checkpointing.index import StoredTensor, dtype_of
from megatron.checkpointing.survey import Survey, differences
from megatron.optimizer.state import OPTIMIZER_STATE
from megatron.training.arguments import Parser, add_config_flags, config_from_namespace
from megatron.training.failure import print_problems


@dataclasses.dataclass(frozen=True)
class InspectConfig(Config):
    """What is shown."""

    ckpt_step: int | None = flag(None, "iteration to look at; the latest if not given")
    verify: bool = flag(False, "read every byte and compare it with its checksum")
    diff: str | None = flag(None, "folder of another run to compare with")
    diff_step: int | None = flag(None, "iteration to compare with; the latest of --diff if not given")

    def problems(self) -> list[str]:
        found = minimum_problems(self, 0, "ckpt_step", "diff_step")
        if self.diff_step is not None and self.diff is None:
            found.append(f"--diff-step {self.diff_step}: it needs --diff, the folder of the other run")
        return found


def size_of(tensor: StoredTensor) -> int:
    """Its bytes."""
    return math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize


def table(tensors: Iterable[StoredTensor]) -> list[str]:
    """A line for each tensor."""
    rows = [
        (t.name, t.dtype, str(list(t.shape)), f"{size_of(t):,}", str(len({piece.file for piece in t.pieces})))
        for t in tensors
    ]
    head = ("tensor", "dtype", "shape", "bytes", "files")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    aligned = ("<", "<", "<", ">", ">")
    return ["  ".join(f"{row[i]:{aligned[i]}{widths[i]}}" for i in range(len(head))) for row in [head, *rows]]


def in_words(values: Any) -> str:
    """The entries of a mapping in one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def summary(directory: Path, survey: Survey) -> list[str]:
    """What the checkpoint is, and what else is in the folder."""
    contents = survey.index.contents
    weights = [t for t in contents.tensors.values() if not t.name.startswith(OPTIMIZER_STATE)]
    own = [tensor for tensors in contents.rank_tensors.values() for tensor in tensors.values()]
    found = [str(number) for number in complete_iterations(directory)]
    lines = [
        f"{survey.folder}: iteration {survey.index.iteration} (saved in {directory}: {', '.join(found)})",
        f"saved at the layout: {in_words(survey.index.layout)}",
        f"weights: {sum(math.prod(t.shape) for t in weights):,} elements in {len(weights)} tensors",
        f"all tensors: {sum(map(size_of, contents.tensors.values())):,} bytes in {len(contents.tensors)} tensors; "
        f"{sum(map(size_of, own)):,} bytes of {len(contents.rank_tensors)} ranks' own",
        f"files: {len(contents.files)}, {sum(contents.files.values()):,} bytes",
    ]
    return lines + [f"{entry.name}: the leftover of an interrupted save" for entry in leftovers(directory)]


def state_lines(survey: Survey) -> list[str]:
    """The parts of the plain values that tell how far the run had come, and with which software."""
    try:
        state = survey.state()
    except DamageError:  # which is told among the problems
        return []
    parts = {part: state[part] for part in ("run", "versions") if isinstance(state.get(part), dict)}
    return [f"{part}: {in_words(values)}" for part, values in parts.items()]


def inspect(directory: Path, config: InspectConfig) -> int:
    """Print all; returns the exit code."""
    survey = Survey.of(directory, config.ckpt_step)
    other = Survey.of(config.diff, config.diff_step) if config.diff is not None else None
    print("\n".join([*summary(directory, survey), *state_lines(survey)]), flush=True)
    if other is None:
        print("\n".join(["", *table(survey.tensors.values())]), flush=True)
    problems = list(survey.problems(verify=config.verify))
    looked = "every byte was read" if config.verify else "checksums of tensors were not looked at: --verify does"
    print(f"\n{'NOT WHOLE' if problems else 'whole'}: {looked}")
    print("".join(f"  {problem}\n" for problem in problems), end="", flush=True)
    if problems or other is None:
        return 1 if problems else 0
    for problem in other.problems():
        raise DamageError(f"--diff: {problem}")
    found = list(differences(survey, other))
    print(f"\n{'DIFFERENT from' if found else 'equal to'} {other.folder}")
    print("".join(f"  {sentence}\n" for sentence in found), end="")
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = Parser(prog="inspect_checkpoint.py", description=description, epilog=epilog)
    parser.add_argument("directory", metavar="DIR", help="folder of a run's checkpoints")
    add_config_flags(parser, InspectConfig)
    try:
        namespace = parser.parse_args(argv)
        return inspect(Path(namespace.directory), config_from_namespace(InspectConfig, namespace))
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the exit
        return 0
    except (ValueError, OSError) as error:
        print_problems(error)
        return 1 if isinstance(error, DamageError) else 2


if __name__ == "__main__":
    sys.exit(main())
