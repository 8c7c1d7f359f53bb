"""How tensors of another program become ours, and ours become theirs: names, cuts, orders of rows, transposition.

An `Entry` says it for one tensor. What is open to every kind of model is here; the tables are with each kind.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron.checkpointing.convert.deferred import Deferred, Readable

# Order of the rows of a fused query, key and value matrix: 3 parts, n heads, d values of a head, the slowest first.
RowOrder = Literal["3nd", "nd3", "n3d"]
OUR_ORDER: RowOrder = "n3d"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of ours and the one of theirs that holds the same.

    Attributes:
        ours, theirs: the names.
        split_dim: the dimension that their tensor ranks cut; None where each of them has the whole.
        transposed: whether their matrix is [input, output], where ours is [output, input].
        fused: whether it is query, key and value together, whose rows have an order.
        vocabulary: whether its rows are tokens, so that theirs may have padding after them.
    """

    ours: str
    theirs: str
    split_dim: int | None = None
    transposed: bool = False
    fused: bool = False
    vocabulary: bool = False


@dataclasses.dataclass(frozen=True)
class Rows:
    """What rows mean on their side: the order of fused ones, the size of a head, and how many of tokens are kept."""

    order: RowOrder
    head_size: int
    vocab_size: int


def reordered(tensor: Tensor, before: RowOrder, after: RowOrder, head_size: int) -> Tensor:
    """Fused rows [3 n d, ...] in the order `after`, which are in the order `before`."""
    if before == after:
        return tensor
    sizes = {"3": 3, "n": tensor.shape[0] // (3 * head_size), "d": head_size}
    apart = tensor.unflatten(0, [sizes[axis] for axis in before])
    places = [before.index(axis) for axis in after]
    return apart.permute(*places, *range(3, apart.dim())).flatten(0, 2)


def imported(entry: Entry, pieces: Sequence[Readable], rows: Rows) -> Readable:
    """Our whole tensor from theirs, one piece for each of their tensor ranks, in order.

    Raises ValueError where the pieces do not fit together, or have fewer rows than there are tokens.
    """
    shape = _whole_shape(entry, pieces)
    if entry.transposed:
        shape = shape[::-1]
    if entry.fused and shape[0] % (3 * rows.head_size * len(pieces)):
        raise ValueError(f"{entry.theirs}: {shape[0]} rows are not whole heads of {rows.head_size} on each rank")
    if entry.vocabulary:
        if shape[0] < rows.vocab_size:
            raise ValueError(
                f"{entry.theirs} has {shape[0]} rows, but the vocabulary has {rows.vocab_size} tokens, by --vocab-size "
                "or the tokenizer"
            )
        shape = (rows.vocab_size, *shape[1:])
    return Deferred(pieces[0].dtype, shape, lambda: _import(entry, pieces, rows))


def _whole_shape(entry: Entry, pieces: Sequence[Readable]) -> tuple[int, ...]:
    if len({(piece.dtype, piece.shape) for piece in pieces}) > 1:
        raise ValueError(f"{entry.theirs}: what the tensor ranks have of it does not fit together")
    shape = list(pieces[0].shape)
    if len(shape) <= (entry.split_dim or 0):
        raise ValueError(f"{entry.theirs} is {shape}, and has no dimension {entry.split_dim or 0} to be split along")
    if entry.split_dim is not None:
        shape[entry.split_dim] *= len(pieces)
    return tuple(shape)


def _import(entry: Entry, pieces: Sequence[Readable], rows: Rows) -> Tensor:
    used = pieces if entry.split_dim is not None else pieces[:1]
    parts = []
    for piece in used:
        part = piece.read()
        if entry.transposed:
            part = part.t()
        if entry.fused:
            part = reordered(part, rows.order, OUR_ORDER, rows.head_size)
        parts.append(part)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, entry.split_dim or 0)
    return (whole[: rows.vocab_size] if entry.vocabulary else whole).contiguous()


def exported(entry: Entry, tensor: Readable, rows: Rows) -> Readable:
    """Their whole tensor from ours."""
    shape = tensor.shape[::-1] if entry.transposed else tensor.shape

    def make() -> Tensor:
        values = tensor.read()
        if entry.fused:
            values = reordered(values, OUR_ORDER, rows.order, rows.head_size)
        return (values.t() if entry.transposed else values).contiguous()

    return Deferred(tensor.dtype, shape, make)


def import_all(
    entries: Iterable[Entry], theirs: Mapping[str, Sequence[Readable]], rows: Rows, prefix: str = ""
) -> dict[str, Readable]:
    """Our tensors by name, each behind `prefix`. Raises ValueError unless `theirs` are exactly those of the entries."""
    table = {entry.theirs: entry for entry in entries}
    refuse_left_overs(theirs, table, "of the source")
    return {prefix + entry.ours: imported(entry, theirs[name], rows) for name, entry in table.items()}


def export_all(entries: Iterable[Entry], ours: Mapping[str, Readable], rows: Rows) -> dict[str, Readable]:
    """Their tensors by name. Raises ValueError unless `ours` are exactly those of the entries."""
    table = {entry.ours: entry for entry in entries}
    refuse_left_overs(ours, table, "of the source")
    return {entry.theirs: exported(entry, ours[name], rows) for name, entry in table.items()}


def refuse_left_overs(there: Collection[str], wanted: Collection[str], where: str) -> None:
    """Raise ValueError naming tensors that are there and not wanted, or wanted and not there."""
    for names, words in (
        (set(there) - set(wanted), f"{where} have no place in the model"),
        (set(wanted) - set(there), f"of the model are not among those {where}"),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"tensors {words}: {', '.join(sorted(names)[:5])}{more}")
