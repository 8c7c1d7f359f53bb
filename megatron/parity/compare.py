"""One run on two layouts: how far their losses, gradients and weights are apart, and whether that is rounding."""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron.parity.closeness import Difference, difference
from megatron.parity.pieces import Whole, assemble
from megatron.parity.record import Record


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Accepted differences, relative to the largest value; of gradients and weights, of the whole model's.

    `weights` is None where they are not judged: Adam turns the rounding of a gradient that is zero in exact arithmetic
    into a step of full size.
    """

    losses: float
    norms: float
    gradients: float
    weights: float | None


TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-9, 1e-9, 1e-9, 1e-9),
    "float32": Tolerance(1e-5, 1e-4, 1e-4, None),
    # About five times what layouts that are right differ by. These find what only mixed precision has wrong.
    "float16": Tolerance(1e-3, 2e-2, 5e-2, None),
    "bfloat16": Tolerance(5e-3, 5e-2, 0.2, None),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run, put together from all of its ranks."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    gradients: list[Whole]
    weights: Whole


def outcome_of(records: Sequence[Record]) -> Outcome:
    """From the records of all ranks. Losses are those of the one that reports."""
    reporting = next((record for record in records if record.losses), records[-1])
    steps = zip(*(record.gradients for record in records), strict=True)
    gradients = [assemble(piece for pieces in ranks for piece in pieces) for ranks in steps]
    weights = assemble(piece for record in records for piece in record.weights)
    return Outcome(reporting.losses, reporting.norms, reporting.evaluations, gradients, weights)


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: its gradient in the iteration that is shown, its weight at the end.

    `gradient_copies` and `weight_copies` are how far the copies that ranks have of it are apart, relative as the
    differences are.
    """

    name: str
    gradient: Difference
    weight: Difference
    gradient_copies: float
    weight_copies: float

    def faults(self, tolerance: Tolerance) -> list[str]:
        """What of it is further apart than accepted."""
        found = [] if self.gradient.within(tolerance.gradients) else ["its gradient differs"]
        found += [] if self.gradient_copies <= tolerance.gradients else ["ranks have different gradients of it"]
        if tolerance.weights is not None:
            found += [] if self.weight.within(tolerance.weights) else ["its weight at the end differs"]
        return found + (
            [] if self.weight_copies <= (tolerance.weights or 0.0) else ["ranks have different weights of it"]
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The differences of a run on a layout from the same run in one process.

    Attributes:
        tolerance: what is accepted.
        numbers: by a name such as "loss 1", of each iteration and evaluation; the values and their difference.
        iteration: the one whose gradients are in `rows`: the first in which any is too far off, else the one in which
            they are furthest off. (Behind a wrong step all is different.)
        rows: a parameter each, those that are furthest off first.
        lost: names of parameters that the two runs do not both have as a whole.
    """

    tolerance: Tolerance
    numbers: dict[str, Difference]
    iteration: int
    rows: list[Row]
    lost: list[str]

    def faults(self) -> list[str]:
        """A sentence for each thing that is further apart than accepted; none where the layout is right."""
        found = [f"{name}: it is not held as a whole, by one of the two runs" for name in self.lost]
        for name, apart in self.numbers.items():
            accepted = self.tolerance.norms if name.startswith("norm") else self.tolerance.losses
            if not apart.within(accepted):
                found.append(f"{name}: {apart.actual:.9g}, in one process {apart.expected:.9g}")
        for row in self.rows:
            found += [f"{row.name}: {fault}" for fault in row.faults(self.tolerance)]
        return found


def compare(actual: Outcome, expected: Outcome, tolerance: Tolerance) -> Comparison:
    """The differences of `actual`, a run on a layout, from `expected`, the same run in one process."""
    numbers: dict[str, Difference] = {}
    for name, mine, theirs in (
        ("loss", actual.losses, expected.losses),
        ("norm", actual.norms, expected.norms),
        ("validation", actual.evaluations, expected.evaluations),
    ):
        numbers |= {f"{name} {k}": difference(a, b) for k, (a, b) in enumerate(zip(mine, theirs, strict=True), 1)}
    gradients = [
        _differences(mine.tensors, theirs.tensors)
        for mine, theirs in zip(actual.gradients, expected.gradients, strict=True)
    ]
    worst = [
        max((max(d.relative, _copies(mine.apart[name], d)) for name, d in step.items()), default=0.0)
        for step, mine in zip(gradients, actual.gradients, strict=True)
    ]
    wrong = [k for k, relative in enumerate(worst) if relative > tolerance.gradients]
    shown = wrong[0] if wrong else worst.index(max(worst))
    weights = _differences(actual.weights.tensors, expected.weights.tensors)
    rows = [
        Row(
            name,
            gradients[shown][name],
            weights[name],
            _copies(actual.gradients[shown].apart[name], gradients[shown][name]),
            _copies(actual.weights.apart[name], weights[name]),
        )
        for name in weights
        if name in gradients[shown]
    ]
    rows.sort(
        key=lambda row: (len(row.faults(tolerance)) > 0, row.gradient.relative, row.weight.relative), reverse=True
    )
    return Comparison(tolerance, numbers, shown + 1, rows, _lost(actual, expected))


def _differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Difference]:
    """Of each tensor that both have, relative to the largest value of all."""
    largest = max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=0.0)
    return {name: difference(actual[name], expected[name], largest) for name in expected if name in actual}


def _copies(apart: float, scale: Difference) -> float:
    """How far copies are `apart`, relative as a difference is."""
    return dataclasses.replace(scale, worst=apart).relative


def _lost(actual: Outcome, expected: Outcome) -> list[str]:
    lost = actual.weights.tensors.keys() ^ expected.weights.tensors.keys()
    for mine, theirs in zip([actual.weights, *actual.gradients], [expected.weights, *expected.gradients], strict=True):
        lost |= (mine.tensors.keys() ^ theirs.tensors.keys()) | set(mine.missing) | set(theirs.missing)
    return sorted(lost)
