"""What a check of a layout found, as text."""

from collections.abc import Sequence
from typing import Any

from megatron.base.words import counted, micro_batches
from megatron.parity.check import Checked
from megatron.parity.compare import Comparison, Row
from megatron.parity.shrink import Degrees, degrees_of, differences
from megatron.training.config import RunConfig

_SHOWN = 10


def what_is_checked(asked: RunConfig, world_size: int, small: RunConfig, degrees: Degrees) -> list[str]:
    """The layout that was asked for, the one that is checked, and what else was made smaller."""
    wanted, steps = degrees_of(asked, world_size), small.training.train_iters
    lines = [
        f"asked for: {_layout(wanted, asked, world_size)}",
        f"checked:   {_layout(degrees, small, degrees.ranks)}; {counted(steps or 0, 'iteration')}, against one process",
    ]
    changed = [f"{name} {_words(before)} -> {_words(after)}" for name, before, after in differences(asked, small)]
    lines += ["made smaller:", *(f"  {line}" for line in changed)] if changed else []
    lost = [n for n in ("tensor", "pipeline", "data") if getattr(wanted, n) > 1 == getattr(degrees, n)]
    if lost:
        lines.append(f"NOT checked, for want of ranks (--max-ranks): parallelism of the kind {' and '.join(lost)}")
    return lines


def _layout(degrees: Degrees, config: RunConfig, ranks: int) -> str:
    batches = micro_batches(config.batch_sizes(ranks).num_micro_batches)
    return f"{degrees} = {counted(degrees.ranks, 'rank')}, {batches} an iteration"


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def table(checked: Checked, everything: bool) -> list[str]:
    """The numbers and parameters of one comparison, the worst parameters first, a few or all of them."""
    comparison = checked.comparison
    lines = [f"{checked.dtype}:", f"  {'':14}{'one process':>16}{'this layout':>16}{'difference':>12}"]
    lines += [
        f"  {name:14}{apart.expected:16.10g}{apart.actual:16.10g}{apart.relative:12.1e}"
        for name, apart in comparison.numbers.items()
    ]
    shown = comparison.rows if everything else comparison.rows[:_SHOWN]
    width = max((len(row.name) for row in shown), default=0) + 2
    lines += [
        "",
        f"  {f'largest difference, gradients of iteration {comparison.iteration}':{width}}  gradient    weight",
    ]
    lines += [f"  {row.name:{width}}{_of_row(row, comparison)}" for row in shown]
    rest = len(comparison.rows) - len(shown)
    return lines + ([f"  {rest} more parameters are nearer (--all shows them)"] if rest else [])


def _of_row(row: Row, comparison: Comparison) -> str:
    faults = "; ".join(row.faults(comparison.tolerance))
    return f"{row.gradient.relative:10.1e}{row.weight.relative:10.1e}{'  <- ' if faults else ''}{faults}"


def verdict(all_checked: Sequence[Checked]) -> list[str]:
    """One line where all is equal, else what is not."""
    found = [f"  in {c.dtype}, {fault}" for c in all_checked for fault in c.comparison.faults()]
    if not found:
        return [f"EQUAL: {'; '.join(map(_accepted, all_checked))}"]
    rest = len(found) - _SHOWN
    more = [f"  and {rest} more"] if rest > 0 else []
    return ["NOT EQUAL: this layout does not train as one process does", *found[:_SHOWN], *more]


def _accepted(checked: Checked) -> str:
    tolerance = checked.comparison.tolerance
    weights = "" if tolerance.weights is None else f", weights {tolerance.weights:g}"
    return (
        f"in {checked.dtype} losses within {tolerance.losses:g}, norms {tolerance.norms:g}, gradients "
        f"{tolerance.gradients:g}{weights}"
    )
