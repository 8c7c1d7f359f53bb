"""Whether a layout trains as one process does: `python tools/check_layout.py [--world-size N] FLAGS OF THE RUN`.

The model is shrunk, with every choice of it and of the layout kept, and trained for a few iterations on synthetic data,
on CPU ranks of this machine and in one process. Losses, gradient norms, gradients and weights are compared parameter by
parameter, in the number format of the run and in float64. No file of the run is needed.

Exit code 0 where they are equal, 1 where they are not or the layout fails, 2 for mistakes in the flags.
With --dry-run nothing is trained: the layout is planned at its full size, and one rank's part of it shown.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.base.complaints import problems_of, raise_joined
from megatron.base.compose import compose, make_section
from megatron.base.config import Config, flag, minimum_problems
from megatron.parity.check import LayoutFailed, check_layout
from megatron.parity.dry_run import plan
from megatron.parity.ranks import RanksFailed
from megatron.parity.record import script_problems
from megatron.parity.report import table, verdict, what_is_checked
from megatron.parity.shrink import degrees_of, fitted, shrunk
from megatron.training.arguments import read_flags
from megatron.training.config import RunConfig
from megatron.training.failure import print_problems

_PRETRAIN_GPT = str(Path(__file__).resolve().parent.parent / "pretrain_gpt.py")
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclasses.dataclass(frozen=True)
class CheckConfig(Config):
    """How to check; all other flags are the run's."""

    world_size: int | None = flag(None, "ranks of the run; one replica of the model if not given")
    max_ranks: int = flag(8, "ranks to train on at most; larger layouts are reduced")
    steps: int = flag(3, "iterations to train")
    float64: bool = flag(False, "compare in float64 alone, not in the number format of the run as well")
    all: bool = flag(False, "show every parameter, not only those that are furthest off")
    timeout: float = flag(600.0, "seconds after which the ranks are ended")
    script: str = flag(_PRETRAIN_GPT, "training script, with a function train(config, observers)")
    dry_run: bool = flag(False, "train nothing: plan the layout at its full size and show the part of --rank")
    rank: int = flag(0, "the rank that --dry-run shows")

    def problems(self) -> list[str]:
        found = minimum_problems(self, 1, "world_size", "steps") + minimum_problems(self, 2, "max_ranks")
        found += minimum_problems(self, 0, "timeout", "rank")
        if self.dry_run and self.script != _PRETRAIN_GPT:
            found.append(f"--script {self.script}: --dry-run plans the model of pretrain_gpt.py, and reads no script")
        if self.rank > 0 and not self.dry_run:
            found.append(f"--rank {self.rank}: it needs --dry-run")
        return found

    def input_problems(self) -> list[str]:
        return script_problems(self.script)

    def rank_problems(self, ranks: int) -> list[str]:
        """One sentence where a run on so many ranks has none that --dry-run could show."""
        if not self.dry_run or self.rank < ranks:
            return []
        return [f"--rank {self.rank}: it must be below the number of ranks, which is {ranks}"]


@dataclasses.dataclass(frozen=True)
class Flags(RunConfig):
    """Train a layout small, hold it against one process: flags of the run, and last those of the check itself."""

    check: CheckConfig


def read(argv: Sequence[str]) -> tuple[CheckConfig, RunConfig, int]:
    """How to check, the run that is meant, and its ranks. Raises ConfigError for what is wrong with either."""
    values, problems = read_flags(Flags, argv, prog="check_layout.py")
    check = None
    try:
        check = make_section(CheckConfig, values)
        problems += check.input_problems()
    except ValueError as error:
        problems += problems_of(error)
    degrees = [values.get(name, 1) for name in _MODEL_PARALLEL]
    replica = degrees[0] * degrees[1] if all(isinstance(size, int) and size > 0 for size in degrees) else 1
    ranks = check.world_size or replica if check else replica
    run = compose(RunConfig, values, ranks, problems)
    assert check is not None  # what is wrong with it is told
    raise_joined(check.rank_problems(ranks))
    return check, run, ranks


def train_and_compare(check: CheckConfig, asked: RunConfig, ranks: int) -> int:
    """The check itself; returns the exit code."""
    degrees = fitted(degrees_of(asked, ranks), check.max_ranks)
    small = shrunk(asked, ranks, degrees, check.steps)
    print("\n".join(what_is_checked(asked, ranks, small, degrees)), flush=True)
    try:
        found = check_layout(check.script, small, degrees.ranks, exact=check.float64, timeout=check.timeout)
    except LayoutFailed as error:
        print(f"\nNOT EQUAL: one process trains, this layout fails\n{error}")
        return 1
    for checked in found:
        print("\n".join(["", *table(checked, check.all)]))
    print("\n".join(["", *verdict(found)]))
    return 1 if any(checked.comparison.faults() for checked in found) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        check, asked, ranks = read(sys.argv[1:] if argv is None else argv)
        if check.dry_run:
            print("\n".join(plan(asked, ranks, check.rank)))
            return 0
        return train_and_compare(check, asked, ranks)
    except (ValueError, OSError) as error:
        print_problems(error)
    except RanksFailed as error:
        print(f"error: the run in one process fails\n{error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
