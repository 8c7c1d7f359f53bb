"""Saves a checkpoint: every rank writes its pieces to a temporary folder, the first one publishes it."""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.base.files import fsync_directory
from megatron.base.rectangles import Rectangle
from megatron.checkpointing.checksum import crc32
from megatron.checkpointing.errors import SaveError, naming_file
from megatron.checkpointing.folders import (
    INDEX,
    STATE,
    clean_leftovers,
    iteration_folder,
    publish,
    remove_older,
    temporary_folder,
)
from megatron.checkpointing.index import (
    Contents,
    Index,
    StoredPiece,
    StoredTensor,
    dtype_name,
    file_name,
    merged,
    rank_name,
)
from megatron.checkpointing.placed import Placed, held_rectangles
from megatron.checkpointing.team import Team
from megatron.checkpointing.values import to_json
from megatron.checkpointing.writer import NewPiece, write_pieces
from megatron.mpu.initialize import resolve_group

# Bytes of a piece that share one checksum; also all that is held in memory beside the tensors themselves.
BLOCK_BYTES = 64 * 2**20


def save_checkpoint(
    directory: str | os.PathLike[str],
    iteration: int,
    tensors: Placed,
    state: Mapping[str, Any],
    rank_tensors: Mapping[str, Tensor],
    *,
    rank: int,
    world_size: int,
    layout: Mapping[str, Any],
    tensor_rank: int | None = None,
    group: ProcessGroup | None = None,
    keep_last: int | None = None,
    left_alone: Collection[int] = (),
) -> Path:
    """Save one checkpoint, all ranks together; returns its folder `directory/iter_NNNNNNN`.

    Args:
        directory: made where it is absent. All ranks must see the same one.
        iteration: number of the checkpoint; an earlier one of the same number is replaced.
        tensors: what this rank writes, by global name, and which rectangles of the global tensors it is; perhaps
            nothing, also on the first rank. Of data replicas, and of pipeline stages with copies of a parameter, that
            hold the same values, one hands them over.
        state: whatever else belongs to the run, as plain values (see `values.to_json`); the first rank's counts.
        rank_tensors: what belongs to this rank alone, such as the states of its random generators.
        rank, world_size: this rank's place in `group`.
        layout: the parallel layout, as plain values; `rank_tensors` come back only where it is the same.
        tensor_rank: place in the tensor group, the current one's by default; tensors that are not split are written
            where it is 0.
        group: all ranks of the job by default.
        keep_last: this many checkpoints are kept, the new one among them: earlier ones beyond are removed when it is
            published. All are kept by default.
        left_alone: iterations whose checkpoints do not count for `keep_last` and are not removed.

    Three small all-reduces over `group`. Raises `SaveError`, on every rank and with the first failing rank's message,
    where anything fails on any; what was there before stays as it was.
    """
    root = Path(directory)
    temporary = temporary_folder(root, iteration)
    team = Team(rank, world_size, group, SaveError)
    try:
        with team.step():
            if rank == 0:
                root.mkdir(parents=True, exist_ok=True)
                clean_leftovers(root)
                temporary.mkdir()
        with team.step():
            first = (resolve_group(None).rank if tensor_rank is None else tensor_rank) == 0
            shared = _own_part(tensors, first)
            own = [_whole(rank_name(rank, name), tensor) for name, tensor in rank_tensors.items()]
            _write_part(temporary, rank, shared, own)
        with team.step():
            if rank == 0:
                _write_index(temporary, iteration, world_size, state, layout)
                publish(root, iteration)
                if keep_last is not None:
                    remove_older(root, iteration, keep_last, left_alone)
    except SaveError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return iteration_folder(root, iteration)


# A tensor as it will be stored, without pieces, and the pieces of it that this rank writes.
_Part = tuple[StoredTensor, list[NewPiece]]


def _own_part(tensors: Placed, first: bool) -> list[_Part]:
    """What this rank writes of the tensors that the ranks share; `first` of its tensor group or not."""
    parts = []
    for name, (tensor, place) in tensors.items():
        held = held_rectangles(tensor, place) if place.split_dim is not None or first else []
        new = [NewPiece(name, rectangle, values) for rectangle, values in held]
        whole = StoredTensor(name, dtype_name(tensor.dtype), tuple(place.global_shape), ())
        parts.append((whole, [piece for piece in new if piece.rectangle.size]))
    return parts


def _whole(name: str, tensor: Tensor) -> _Part:
    """A tensor that is one piece."""
    shape = tuple(tensor.shape)
    piece = NewPiece(name, Rectangle.whole(shape), tensor)
    return StoredTensor(name, dtype_name(tensor.dtype), shape, ()), [piece] if piece.rectangle.size else []


def _write_part(folder: Path, rank: int, shared: list[_Part], own: list[_Part]) -> None:
    """Write this rank's file of pieces, if it has any, and its part of the index, which the first rank merges."""
    pieces = [piece for _, new in shared + own for piece in new]
    path = folder / file_name(rank)
    stored = write_pieces(path, pieces, BLOCK_BYTES) if pieces else []
    tensors = _with_pieces(shared, stored)
    own_tensors = _with_pieces(own, stored)
    by_plain_name = {name.removeprefix(rank_name(rank, "")): tensor for name, tensor in own_tensors.items()}
    files = {path.name: path.stat().st_size} if pieces else {}
    part = Contents(tensors, {rank: by_plain_name}, files)
    with naming_file(_part_file(folder, rank)):
        _part_file(folder, rank).write_text(json.dumps(part.as_json()), encoding="utf-8")


def _with_pieces(parts: Iterable[_Part], stored: list[tuple[str, StoredPiece]]) -> dict[str, StoredTensor]:
    pieces: dict[str, list[StoredPiece]] = {tensor.name: [] for tensor, _ in parts}
    for name, piece in stored:
        if name in pieces:
            pieces[name].append(piece)
    return {t.name: StoredTensor(t.name, t.dtype, t.shape, tuple(pieces[t.name])) for t, _ in parts}


def _part_file(folder: Path, rank: int) -> Path:
    return folder / f"part_{rank:05d}.json"


def _write_index(
    folder: Path, iteration: int, world_size: int, state: Mapping[str, Any], layout: Mapping[str, Any]
) -> None:
    """Merge the parts of all ranks into the index, after a proof that they cover every tensor exactly once."""
    parts = [_part_file(folder, rank) for rank in range(world_size)]
    contents = merged(Contents.from_json(json.loads(part.read_text(encoding="utf-8"))) for part in parts)
    contents.check_cover()
    state_text = to_json(state).encode()
    index = Index(iteration, json.loads(to_json(layout)), BLOCK_BYTES, crc32(state_text), contents)
    _write_durably(folder / STATE, state_text)
    _write_durably(folder / INDEX, index.to_json().encode())
    for part in parts:
        part.unlink()
    fsync_directory(folder)


def _write_durably(path: Path, content: bytes) -> None:
    with naming_file(path), open(path, "xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
