"""Loads a checkpoint: finds it, proves it whole, and fills tensors in place from the pieces that overlap them."""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.base.rectangles import Rectangle
from megatron.checkpointing.checksum import crc32
from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.folders import (
    INDEX,
    STATE,
    leftovers,
    none_there,
    read_whole,
    tracked_iteration,
    whole_folder,
)
from megatron.checkpointing.index import Index, StoredTensor, dtype_name, dtype_of
from megatron.checkpointing.placed import Place, Placed, held_rectangles
from megatron.checkpointing.reader import PieceReader
from megatron.checkpointing.team import Team
from megatron.checkpointing.values import from_json, to_json

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadedState:
    """What a checkpoint holds beside the tensors that were filled.

    Attributes:
        iteration: when it was saved.
        state: the plain values given to `save_checkpoint`.
        layout: the parallel layout that it was saved at.
        rank_tensors: this rank's own tensors, None where the layout is not that of the checkpoint.
    """

    iteration: int
    state: dict[str, Any]
    layout: dict[str, Any]
    rank_tensors: dict[str, Tensor] | None


def read_state(directory: str | os.PathLike[str], iteration: int | None = None) -> dict[str, Any]:
    """The plain values of a checkpoint, which `save_checkpoint` was given as `state`; no tensor is read.

    Arguments and errors as for `load_checkpoint`.
    """
    folder, number = find(Path(directory), iteration)
    index, _ = read_index(folder, number)
    return read_state_of(folder, index)


# From the plain values and the stored tensors by name to what is to be filled; ValueError where they do not fit.
Choice = Callable[[dict[str, Any], Mapping[str, StoredTensor]], Placed]


def load_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Placed | Choice,
    *,
    rank: int,
    layout: Mapping[str, Any],
    iteration: int | None = None,
    skip: Collection[str] = (),
    cast: bool = False,
    world_size: int = 1,
    group: ProcessGroup | None = None,
) -> LoadedState:
    """Fill `tensors` in place from a checkpoint, whatever layout it was saved at.

    Args:
        directory: where the folders `iter_NNNNNNN` and the tracker lie.
        tensors: what this rank holds, by global name; those of all ranks together are exactly those that the
            checkpoint has, less those in `skip`. What is in no rectangle of a tensor, such as the padding rows of a
            vocabulary, becomes zero. Or a function that says so once it has seen what is stored (less `skip`).
        rank: this rank's number, whose own tensors are returned.
        layout: the present parallel layout.
        iteration: which checkpoint; the one that the tracker names by default.
        skip: beginnings of names that are left unread, such as "optimizer."; the same on all ranks.
        cast: whether a tensor of floating-point numbers may be stored in another format, from which it is rounded.
        world_size, group: ranks that load together. With more than one they agree on what they see, what they want and
            how it went: four small all-reduces, the largest of a byte for each stored tensor.

    Raises `DamageError`, a ValueError, naming the file or tensor, and on every rank that agrees, where the checkpoint
    or its folder is missing or was given another number, the tracker, index or state is broken, a file is missing, cut
    or does not match its checksums, or the stored tensors are not covered exactly once. Raises plain ValueError where
    there is no tracker, the index is not the same on all ranks, or the stored tensors are not the wanted ones in name,
    shape and (but for `cast`) dtype. Then no tensor was touched, unless it was for a checksum. Only blocks that hold
    wanted values are read and verified. Nothing that is read can run code.
    """
    team = Team(rank, world_size, group, ValueError, DamageError)
    with team.step():
        root = Path(directory)
        folder, number = find(root, iteration)
        if rank == 0:
            _report_leftovers(root, folder)
        index, checksum = read_index(folder, number)
        state = read_state_of(folder, index)
        stored = {name: t for name, t in index.contents.tensors.items() if not name.startswith(tuple(skip))}
        wanted = tensors(state, stored) if callable(tensors) else tensors
        check_files(folder, index)
        _check_wanted(folder, stored, wanted, cast)
        index.contents.check_cover()
    _check_nothing_is_left(team, folder, checksum, stored, wanted)
    with team.step():
        with PieceReader(folder, index.block_bytes) as reader, torch.no_grad():
            reader.read([(stored[name], _targets(tensor, place)) for name, (tensor, place) in wanted.items()])
            same_layout = json.loads(to_json(layout)) == index.layout
            own = _read_own(reader, folder, index, rank) if same_layout else None
        return LoadedState(index.iteration, state, dict(index.layout), own)


def find(directory: Path, iteration: int | None) -> tuple[Path, int]:
    """The folder of a checkpoint, by default the tracker's, and its iteration. Raises ValueError where it is not."""
    if iteration is None:
        iteration = tracked_iteration(directory)
    if iteration is None or not directory.is_dir():
        raise ValueError(f"{directory}: {none_there(directory)}")
    return whole_folder(directory, iteration), iteration


def _report_leftovers(directory: Path, loaded: Path) -> None:
    for entry in leftovers(directory):
        words = (
            "loaded, for an interrupted save left it so" if entry == loaded else "the leftover of an interrupted save"
        )
        _logger.warning("%s: %s is %s", directory, entry.name, words)


def read_index(folder: Path, iteration: int) -> tuple[Index, int]:
    """The index, and the CRC-32 of its file. Raises `DamageError` where it is not whole."""
    path = folder / INDEX
    content = read_whole(path)
    try:
        index = Index.from_json(content)
    except ValueError as error:
        raise DamageError(f"{path}: the index is broken: {error}") from error
    if index.iteration != iteration:
        raise DamageError(
            f"{path}: it is of iteration {index.iteration}, and the folder's name says {iteration}: they must be one"
        )
    return index, crc32(content)


def read_state_of(folder: Path, index: Index) -> dict[str, Any]:
    """The plain values of the checkpoint in `folder`. Raises `DamageError` where they are not what was saved."""
    path = folder / STATE
    content = read_whole(path)
    if crc32(content) != index.state_checksum:
        raise DamageError(f"{path}: it does not match its checksum")
    try:
        state = from_json(content)
    except ValueError as error:
        raise DamageError(f"{path}: it cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise DamageError(f"{path}: it must be a JSON object, and is a {type(state).__name__}")
    return state


def check_files(folder: Path, index: Index) -> None:
    """Raise `DamageError` naming the first file that is missing, elsewhere or not of the size that was written."""
    for name, size in index.contents.files.items():
        path = folder / name
        if not path.is_file():
            raise DamageError(f"{path}: the file is missing")
        if path.is_symlink() and path.resolve().parent != folder.resolve():
            raise DamageError(f"{path}: it is a link to {path.resolve()}, out of the checkpoint's folder")
        if path.stat().st_size != size:
            raise DamageError(f"{path}: it has {path.stat().st_size} bytes, {size} were written")


def _check_wanted(folder: Path, stored: Mapping[str, StoredTensor], tensors: Placed, cast: bool) -> None:
    """Raise ValueError unless each of this rank's tensors is stored, in the wanted shape and dtype."""
    _refuse(folder, tensors.keys() - stored.keys(), "of the model are not in the checkpoint")
    for name, (tensor, place) in tensors.items():
        _check_kind(folder, stored[name], tensor, place, cast)


def _check_nothing_is_left(
    team: Team, folder: Path, checksum: int, stored: Mapping[str, StoredTensor], tensors: Placed
) -> None:
    """Raise ValueError, on all ranks, where a stored tensor is wanted by none of them; `checksum` is the index's."""
    if not team.are_equal(checksum):
        raise ValueError(f"{folder / INDEX}: it is not the same on all ranks, which must see one folder")
    wanted = team.union([name in tensors for name in stored])
    left = [name for name, is_wanted in zip(stored, wanted, strict=True) if not is_wanted]
    _refuse(folder, left, "of the checkpoint are not in the model")


def _refuse(folder: Path, names: Collection[str], words: str) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(f"{folder}: tensors {words}: {', '.join(sorted(names)[:3])}{more}")


def _check_kind(folder: Path, stored: StoredTensor, tensor: Tensor, place: Place, cast: bool) -> None:
    castable = cast and tensor.is_floating_point() and dtype_of(stored.dtype).is_floating_point
    wanted = (tuple(place.global_shape), stored.dtype if castable else dtype_name(tensor.dtype))
    if (stored.shape, stored.dtype) != wanted:
        raise ValueError(
            f"{folder}: tensor {stored.name} is {stored.dtype} {list(stored.shape)} in the checkpoint "
            f"and {wanted[1]} {list(wanted[0])} in the model"
        )


def _targets(tensor: Tensor, place: Place) -> list[tuple[Rectangle, Tensor]]:
    """Where in `tensor` which part of the global tensor is wanted; what is in no part becomes zero."""
    targets = held_rectangles(tensor, place)
    if sum(rectangle.size for rectangle, _ in targets) < tensor.numel():
        tensor.detach().zero_()
    return targets


def _read_own(reader: PieceReader, folder: Path, index: Index, rank: int) -> dict[str, Tensor]:
    if rank not in index.contents.rank_tensors:
        raise DamageError(f"{folder / INDEX}: it does not have rank {rank}, although the layout is the same")
    own = {}
    for name, stored in index.contents.rank_tensors[rank].items():
        own[name] = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        reader.read([(stored, [(Rectangle.whole(stored.shape), own[name])])])
    return own
