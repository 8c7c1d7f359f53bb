"""A layout held against one process: the runs that are made for it, and what came of them."""

import dataclasses
import tempfile
from pathlib import Path

from megatron.base.compose import compose
from megatron.parity.compare import TOLERANCES, Comparison, compare, outcome_of
from megatron.parity.ranks import Job, RanksFailed, run_jobs
from megatron.parity.record import Record, record_run, train_of
from megatron.parity.shrink import flat, in_float64, one_process
from megatron.parity.synthetic import write_documents
from megatron.training.config import RunConfig


class LayoutFailed(Exception):
    """The run on the layout did not end as it should, and the one in one process did."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """One comparison: in which number format, and what it gave."""

    dtype: str
    comparison: Comparison


def formats(config: RunConfig, ranks: int, exact: bool) -> list[RunConfig]:
    """The run in the format that it asks for, and in float64, with `exact` in float64 alone."""
    double = in_float64(config, ranks)
    return [double] if exact or double.precision == config.precision else [config, double]


def record_runs(script: str, configs: list[RunConfig]) -> list[Record]:
    """Run `configs` one after another on the ranks that exist, and record each."""
    train = train_of(script)
    return [record_run(train, config) for config in configs]


def check_layout(script: str, config: RunConfig, ranks: int, *, exact: bool, timeout: float) -> list[Checked]:
    """Train a small run on `ranks` local ranks and in one process, in each of its `formats`, and compare.

    Args:
        script: a training script with a function `train(config, observers)`, as pretrain_gpt.py has.
        config: of the small run; data is made for it.

    Raises LayoutFailed, or RanksFailed where one process fails as well.
    """
    with tempfile.TemporaryDirectory(prefix="check_layout_") as folder:
        data = {"data_path": (write_documents(Path(folder) / "tokens"),), "data_cache_path": folder}
        made = [compose(RunConfig, flat(c) | data, ranks) for c in formats(config, ranks, exact)]
        alone = [one_process(c) for c in made]
        serial, spread = Job(1, record_runs, (script, alone)), Job(ranks, record_runs, (script, made))
        try:
            ([expected], actual) = run_jobs([serial, spread], timeout)
        except RanksFailed as error:
            if error.job == 0:
                raise
            raise LayoutFailed(str(error)) from error
    names = [str(c.precision.dtype).removeprefix("torch.") for c in made]
    return [
        Checked(name, compare(outcome_of(records), outcome_of([single]), TOLERANCES[name]))
        for name, single, *records in zip(names, expected, *actual, strict=True)
    ]
