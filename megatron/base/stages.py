"""The part of a model that a stage of a pipeline holds; models and pipelines meet in it."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StagePart:
    """What one stage holds of a model.

    Attributes:
        layers: their global numbers, from 0.
        embedding: whether it begins the model, from token ids.
        head: whether it ends the model: the norm after the last layer, the output projection, the loss.
    """

    layers: range
    embedding: bool
    head: bool


def whole_model(num_layers: int) -> StagePart:
    """The one part of a model that is not split."""
    return StagePart(range(num_layers), embedding=True, head=True)


def part_problems(parts: Sequence[StagePart], num_layers: int) -> list[str]:
    """A sentence for each thing that makes `parts`, those of one rank, no parts of a model of `num_layers` layers."""
    layers = [number for part in parts for number in part.layers]
    problems = [] if parts else ["stages: there must be at least one"]
    if any(not 0 <= number < num_layers for number in layers):
        problems.append(f"stages with the layers {layers}: they must be from 0 to {num_layers - 1}")
    if layers != sorted(set(layers)):
        problems.append(f"stages with the layers {layers}: each may stand there once, in the order of the model")
    if any(part.embedding for part in parts[1:]) or any(part.head for part in parts[:-1]):
        problems.append("stages: only the first may have the embedding, and only the last the head")
    return problems
