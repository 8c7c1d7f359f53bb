"""Moves boundary tensors between the ranks of a pipeline: one batch of sends and receives for each exchange."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import SERIAL_GROUP, all_gather_first_dim, resolve_group
from megatron.mpu.initialize import Group, GroupInfo
from megatron.pipeline.actions import Message

_MAX_DIMS = 7  # of a boundary tensor whose shape is sent ahead of it; the header has a fixed size


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What passes from stage to stage, and its gradient back.

    Attributes:
        shape: of every boundary tensor on one rank, `[s, b, h]`, or `[s/t, b, h]` with sequence parallelism; None where
            it varies: then each activation is preceded by its shape, and a rank waits in an exchange until that has
            come. A gradient has the shape of its activation, which is known.
        dtype, device: of all of them.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")


class _Once:
    """A work that several messages may wait for: waited for once, as gloo's hang at a second time."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


@dataclasses.dataclass(frozen=True)
class _Arriving:
    """A tensor on its way to this rank: `part` is what is received, a slice of `whole` or all of it."""

    whole: Tensor
    part: Tensor
    work: _Once


class Transport:
    """Sends and receives of one rank over its pipeline group, by `torch.distributed.batch_isend_irecv`.

    Messages between two ranks are told apart by their order alone, as NCCL does; exchanges follow one another on one
    stream there. A tensor that is sent is let go of when the next one is sent: `wait` comes first, which on a device
    with streams makes the current stream wait, so its memory is not used again too early.

    Making one is collective over `group`: a communicator must exist before some of its ranks alone use it.

    Args:
        boundary: what is moved.
        group: the pipeline group, its ranks in the order of stages.
        scatter_gather: the tensor group, where boundary tensors are equal on its ranks (no sequence parallelism): each
            of them sends its part, to be gathered on arrival (one all-gather). What does not divide is sent whole.
            None sends everything whole.
    """

    def __init__(self, boundary: Boundary, group: dist.ProcessGroup, *, scatter_gather: Group = None) -> None:
        self._boundary = boundary
        self._group = group
        self._global_ranks = dist.get_process_group_ranks(group)
        self._tensor: GroupInfo = SERIAL_GROUP if scatter_gather is None else resolve_group(scatter_gather)
        self._arriving: dict[Message, _Arriving] = {}
        self._leaving: list[tuple[Tensor, _Once]] = []
        self._gradient_shapes: dict[Message, tuple[int, ...]] = {}
        dist.all_reduce(torch.zeros(1, device=boundary.device), group=group)

    def start(self, sends: Sequence[tuple[Message, Tensor]], receives: Sequence[Message]) -> None:
        """Begin an exchange and go on. One with a send waits for the send before it, a pass ago.

        Raises ValueError where a tensor to be sent is not what the boundary says.
        """
        for message, tensor in sends:
            self._check(message, tensor)
        if sends:
            self._finish_sends()
        shapes = self._shapes([(m, tuple(x.shape)) for m, x in sends], receives)
        parts = [self._part(tensor.detach().contiguous()) for _, tensor in sends]
        wholes = [torch.empty(shape, dtype=self._boundary.dtype, device=self._boundary.device) for shape in shapes]
        buffers = [self._part(whole) for whole in wholes]
        works = self._batch(
            zip((message for message, _ in sends), parts, strict=True), zip(receives, buffers, strict=True)
        )
        self._leaving += zip(parts, works[: len(parts)], strict=True)
        arriving = zip(wholes, buffers, works[len(parts) :], strict=True)
        self._arriving |= {message: _Arriving(*one) for message, one in zip(receives, arriving, strict=True)}

    def take(self, message: Message) -> Tensor:
        """The tensor of `message`, whose receive has begun: waits for it, and gathers it where it came in parts."""
        arriving = self._arriving.pop(message)
        arriving.work.wait()
        if arriving.part.numel() < arriving.whole.numel():
            all_gather_first_dim(arriving.part, self._tensor, out=arriving.whole.view(-1))
        return arriving.whole

    def finish(self) -> None:
        """Wait for what is still under way, at the end of a program."""
        self._finish_sends()
        assert not self._arriving, f"received and never taken: {', '.join(map(str, self._arriving))}"
        self._gradient_shapes.clear()

    def _finish_sends(self) -> None:
        for _, work in self._leaving:
            work.wait()
        self._leaving = []

    def _check(self, message: Message, tensor: Tensor) -> None:
        shape, dtype, device = self._boundary.shape, self._boundary.dtype, self._boundary.device
        shape_fits = tensor.dim() <= _MAX_DIMS if shape is None else tuple(tensor.shape) == shape
        if not shape_fits or tensor.dtype != dtype or tensor.device.type != device.type:
            expected = f"at most {_MAX_DIMS} dimensions" if shape is None else f"shape {list(shape)}"
            raise ValueError(
                f"{message}: it has shape {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}; the boundary "
                f"between stages was said to have {expected}, {dtype}, on {device}"
            )

    def _part(self, whole: Tensor) -> Tensor:
        """This tensor rank's part of a contiguous tensor, flat, or all of it."""
        info, flat = self._tensor, whole.view(-1)
        if flat.numel() % info.size:
            return flat
        length = flat.numel() // info.size
        return flat[info.rank * length : (info.rank + 1) * length]

    def _batch(
        self, sends: Iterable[tuple[Message, Tensor]], receives: Iterable[tuple[Message, Tensor]]
    ) -> list[_Once]:
        """Start all of them as one; a work for each, sends first. NCCL has one work for a batch."""
        operations = [dist.P2POp(dist.isend, x, self._global_ranks[m.destination], self._group) for m, x in sends]
        operations += [dist.P2POp(dist.irecv, x, self._global_ranks[m.source], self._group) for m, x in receives]
        if not operations:
            return []
        works = [_Once(work) for work in dist.batch_isend_irecv(operations)]
        return works if len(works) == len(operations) else works * len(operations)

    def _shapes(
        self, sends: Sequence[tuple[Message, tuple[int, ...]]], receives: Sequence[Message]
    ) -> list[tuple[int, ...]]:
        """The shapes of what is to be received; where they vary, those of activations are exchanged here."""
        if self._boundary.shape is not None:
            return [self._boundary.shape] * len(receives)
        headers = [(m, self._header(shape)) for m, shape in sends if m.payload == "activation"]
        incoming = [(m, self._header(())) for m in receives if m.payload == "activation"]
        for work in self._batch(headers, incoming):
            work.wait()
        came = {m: tuple(row[1 : 1 + row[0]]) for m, row in ((m, header.tolist()) for m, header in incoming)}
        activations = [*((m, shape) for m, shape in sends if m.payload == "activation"), *came.items()]
        self._gradient_shapes |= {_answer(message): shape for message, shape in activations}
        return [came[m] if m in came else self._gradient_shapes.pop(m) for m in receives]

    def _header(self, shape: tuple[int, ...]) -> Tensor:
        row = [len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))]
        return torch.tensor(row, device=self._boundary.device)


def _answer(message: Message) -> Message:
    """The gradient that comes back for an activation."""
    _, micro_batch, source, source_chunk, destination, destination_chunk = message
    return Message("gradient", micro_batch, destination, destination_chunk, source, source_chunk)
