"""Parallel layouts of a whole run, and what each rank holds when it saves and when it has just loaded."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from megatron.checkpointing.placed import held_rectangles
from megatron.training import start
from megatron.training.config import RunConfig
from megatron.training.resuming import restore
from megatron.training.state import Trainee
from tests.harness.runs import Outcome, Recorder, outcome_of, run_pretrain


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is spread over ranks. Each field is a dimension that may change between a save and a load."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    sharded: bool = False
    sequence: bool = False

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.tensor * self.pipeline * self.data

    def flags(self, num_layers: int) -> dict[str, Any]:
        """For `tests.harness.runs.flags`, of a model of `num_layers`."""
        each = num_layers // (self.pipeline * self.virtual)
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "num_layers_per_virtual_pipeline_stage": each if self.virtual > 1 else None,
            "use_distributed_optimizer": self.sharded or None,
            "sequence_parallel": self.sequence or None,
        }


DIMENSIONS = tuple(field.name for field in dataclasses.fields(Layout))

Change = tuple[str, Any, Any]  # of a dimension, from a value to another


def changes(saved: Layout, loaded: Layout) -> set[Change]:
    """What differs between two layouts."""
    pairs = ((name, getattr(saved, name), getattr(loaded, name)) for name in DIMENSIONS)
    return {(name, before, after) for name, before, after in pairs if before != after}


def all_changes(layouts: Iterable[Layout]) -> set[Change]:
    """Every change of a dimension between the values that it has in `layouts`, both ways."""
    known = list(layouts)
    return {
        (name, before, after)
        for name in DIMENSIONS
        for before, after in itertools.permutations({getattr(layout, name) for layout in known}, 2)
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint of `model`, saved at one layout and loaded at others, all by name."""

    model: str
    saved_at: str
    loaded_at: tuple[str, ...]


def table_gaps(layouts: Mapping[str, Layout], cases: Sequence[Case], loads: int) -> list[str]:
    """What a table of cases lacks, a sentence each.

    Each layout is to be saved at once and loaded at `loads` others; every change of each dimension is to occur, both
    ways; and with tied embeddings as without each dimension is to change up and down. The model of a case is untied
    where its name begins with "untied".
    """
    found = [f"{name}: saved at {n} times" for name in layouts if (n := sum(c.saved_at == name for c in cases)) != 1]
    for case in cases:
        others = [name for name in case.loaded_at if changes(layouts[case.saved_at], layouts[name])]
        if len(set(others)) != loads or len(others) != len(case.loaded_at):
            found.append(f"{case.saved_at}: loaded at {len(set(others))} others")
    loaded = [(case, layouts[name]) for case in cases for name in case.loaded_at]
    seen = [(case.model.startswith("untied"), changes(layouts[case.saved_at], at)) for case, at in loaded]
    missing = all_changes(layouts.values()) - set().union(*(of_one for _, of_one in seen))
    found += [f"{name}: never from {before} to {after}" for name, before, after in sorted(missing)]
    for untied, name, up in itertools.product((False, True), DIMENSIONS, (False, True)):
        steps = (step for tying, of_one in seen if tying == untied for step in of_one)
        if not any(step[0] == name and (step[2] > step[1]) == up for step in steps):
            found.append(f"{name}: never {'up' if up else 'down'} {'un' * untied}tied")
    return found


def run_watched(rank: int, world_size: int, words: Sequence[str]) -> tuple[Outcome, list[Outcome]]:
    """As `run_pretrain`; and what this rank held each time that it had loaded or was about to write a checkpoint."""
    held: list[Outcome] = []
    written = Trainee.written

    def restoring(trainee: Trainee, config: RunConfig, *args: Any) -> Any:
        if config.checkpoint.load is not None:
            for tensor, _ in trainee.tensors().values():
                tensor.fill_(7.0)  # nothing that happened to be there may be taken for what was loaded
        told = restore(trainee, config, *args)
        held.append(_held(trainee))
        return told

    def writing(trainee: Trainee) -> Any:
        held.append(_held(trainee))
        return written(trainee)

    with mock.patch.object(start, "restore", restoring), mock.patch.object(Trainee, "written", writing):
        return run_pretrain(rank, world_size, words), held


def _held(trainee: Trainee) -> Outcome:
    """As it is now; asserts that what is in no part of a global tensor, the padding of the vocabulary, is zero."""
    for name, (tensor, place) in trainee.tensors().items():
        real = sum(int(torch.count_nonzero(values)) for _, values in held_rectangles(tensor, place))
        assert int(torch.count_nonzero(tensor.detach())) == real, f"{name}: padding that is not zero"
    return outcome_of(trainee, Recorder())
