"""The optimizer of a classic checkpoint: its tensors, which have numbers, under the names of the parameters."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.convert.classic import COPY, ClassicCheckpoint, ClassicFile, pieces_of_model
from megatron.checkpointing.convert.deferred import Deferred, Readable
from megatron.checkpointing.convert.kinds import check_optimizer
from megatron.checkpointing.convert.torch_files import FileTensor
from megatron.checkpointing.untrusted import shown

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_INNER = ("optimizer", "optimizer_state_dict")
_ADAM = ("exp_avg", "exp_avg_sq")
_KINDS = (*_ADAM, "momentum_buffer")
_MASTER = "master_weight"
_HEADS = ("lm_head.", "binary_head.", "classification_head.", "multichoice_head.")

# A parameter: the number of its chunk, and its name in it.
_Place = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class ClassicOptimizer:
    """State of the optimizer.

    Attributes:
        tensors: for each kind (`exp_avg`, `master_weight`, ...) the tensors of the whole model, pieces by tensor rank.
        state: what ours keeps beside tensors.
    """

    tensors: Mapping[str, Mapping[str, Sequence[Readable]]]
    state: dict[str, Any]


def read_optimizer(checkpoint: ClassicCheckpoint) -> ClassicOptimizer | None:
    """The optimizer's state, None where the checkpoint has none. Raises ValueError where it is not understood.

    Where it has not taken a step yet, for the gradients have overflowed so far, Adam's moments are zeros.
    """
    if all(file.record.get("optimizer") is None for file in checkpoint.files.values()):
        return None
    steps: set[int] = set()
    chunks: dict[str, dict[tuple[int, int], list[dict[str, FileTensor]]]] = {}
    for place, file in checkpoint.files.items():
        try:
            check_optimizer(file.record.get("optimizer"), _MASTERS, _INNER)
            states = _read_file(file, steps)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # a strange file can fail in any way
            where = f"{checkpoint.folder}: optimizer of pipeline and tensor rank {place}"
            what = error if isinstance(error, ValueError) else f"it is not understood ({error!r})"
            raise ValueError(f"{where}: {what}") from error
        for kind, of_chunks in states.items():
            chunks.setdefault(kind, {})[place] = of_chunks
    if not chunks:
        return None
    if any(len(places) < len(checkpoint.files) for places in chunks.values()) or len(steps) > 1:
        raise ValueError(f"{checkpoint.folder}: the optimizers of the ranks do not have the same kinds and steps")
    tensors = {kind: pieces_of_model(checkpoint, places) for kind, places in chunks.items()}
    for pieces in tensors.values():
        pieces.pop(COPY, None)
    if tensors.keys() == {_MASTER} and checkpoint.args.get("optimizer", "adam") == "adam":
        tensors |= {kind: _zeros(tensors[_MASTER]) for kind in _ADAM}
    state = {
        "step_count": next(iter(steps), 0),
        "skipped_in_a_row": 0,
        "loss_scaler": _loss_scaler(checkpoint.record["optimizer"], checkpoint.folder),
    }
    return ClassicOptimizer(tensors, state)


def _zeros(tensors: Mapping[str, list[Readable]]) -> dict[str, list[Readable]]:
    """As large as `tensors`."""
    return {name: [_zero(piece) for piece in pieces] for name, pieces in tensors.items()}


def _zero(tensor: Readable) -> Readable:
    return Deferred(tensor.dtype, tensor.shape, lambda: torch.zeros(tensor.shape, dtype=tensor.dtype))


def _read_file(file: ClassicFile, steps: set[int]) -> dict[str, list[dict[str, FileTensor]]]:
    """Each kind of state of one rank, by chunk and name; adds the number of steps to `steps`."""
    saved = file.record["optimizer"]
    plain = _first_of(saved, _INNER, saved)  # for 16 bits it is inside of another
    groups, states = plain["param_groups"], plain["state"]
    numbers = [number for group in groups for number in group["params"]]
    masters = [master for group in _first_of(saved, _MASTERS, []) for master in group]
    if masters and len(masters) != len(numbers):
        raise ValueError(f"there are {len(masters)} master weights for {len(numbers)} parameters")
    of_parameter = [dict(states.get(number, {})) for number in numbers]
    steps |= {int(_number(step)) for step in _steps(groups, of_parameter)}
    for state, master in zip(of_parameter, masters, strict=False):
        state[_MASTER] = master
    kinds = {kind for state in of_parameter for kind in state}
    unknown = kinds - {*_KINDS, _MASTER}
    if unknown or any(state.keys() != kinds for state in of_parameter):
        named = ", ".join(map(shown, sorted(unknown)))
        raise ValueError(f"its state is not understood: {named or 'some parameters lack a part'}")
    found: dict[str, list[dict[str, FileTensor]]] = {kind: [{} for _ in file.chunks] for kind in kinds}
    for (chunk, name), state in zip(_places(file, of_parameter), of_parameter, strict=True):
        for kind in kinds:
            found[kind][chunk][name] = state[kind]
    return found


def _first_of(saved: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    return next((saved[name] for name in names if name in saved), default)


def _steps(groups: Sequence[Mapping[str, Any]], states: Sequence[dict[str, Any]]) -> list[Any]:
    """Numbers of steps, taken out of the states: some optimizers count them there, others in the groups."""
    return [s.pop("step") for s in states if "step" in s] or [g["step"] for g in groups if "step" in g]


def _places(file: ClassicFile, states: Sequence[Mapping[str, FileTensor]]) -> list[_Place]:
    """Which parameter each state belongs to: of the orders that programs have, the one in which all shapes fit."""
    shapes = [{state[kind].shape for kind in state} for state in states]
    for places in _orders(file):
        expected = [{file.chunks[chunk][name].shape} for chunk, name in places]
        if expected == shapes or (len(expected) == len(shapes) and not any(shapes)):
            return places
    raise ValueError("the shapes of its state are not those of the parameters")


def _orders(file: ClassicFile) -> Iterator[list[_Place]]:
    """Orders of the parameters: those that are decayed (matrices) before the others, in all chunks or in each.

    The copy of the word embeddings is between the transformer and its heads, where Megatron-LM makes it, or behind or
    before the rest of its chunk.
    """
    for copy_first, apart in itertools.product((None, False, True), (False, True)):
        chunks = []
        for number, chunk in enumerate(file.chunks):
            names = sorted(chunk, key=functools.partial(_rank_of, copy_first))
            decayed = [(number, name) for name in names if len(chunk[name].shape) > 1]
            chunks.append((decayed, [(number, name) for name in names if len(chunk[name].shape) <= 1]))
        if apart:
            yield [place for both in chunks for places in both for place in places]
        else:
            yield [place for part in (0, 1) for both in chunks for place in both[part]]


def _rank_of(copy_first: bool | None, name: str) -> int:
    """What to sort the names of a chunk by: the copy of the word embeddings behind, before or (None) among them."""
    if copy_first is None:
        return 1 if name == COPY else 2 * name.startswith(_HEADS)
    return int((name == COPY) != copy_first)


def _number(value: Any) -> float:
    """A number, or that in a tensor of one element."""
    number = float(value.read().item()) if isinstance(value, FileTensor) else float(value)
    if not math.isfinite(number):
        raise ValueError(f"there is {number} where a number is expected")
    return number


def _loss_scaler(optimizer: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The state of a dynamic loss scale; empty where it is constant or there is none."""
    saved = optimizer.get("grad_scaler", {})
    if not isinstance(saved, dict) or not {"scale", "growth_tracker", "hysteresis_tracker"} <= saved.keys():
        return {}
    try:
        return {
            "scale": _number(saved["scale"]),
            "clean_steps": int(_number(saved["growth_tracker"])),
            "patience": max(int(_number(saved["hysteresis_tracker"])), 0),  # theirs goes on falling
        }
    except TypeError as error:
        raise ValueError(f"{folder}: its loss scale is not a number") from error
