"""Whole tensors of a split model: put together from every rank's pieces, and dealt out to them."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.sharding import Sharding, parameter_shardings

Pieces = list[tuple[tuple[int, ...], Tensor]]


def load_whole(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy each rank's part of the `whole` tensors (name -> global tensor) into its parameters; padding gets zeros."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == whole.keys(), sorted(parameters.keys() ^ whole.keys())
    shardings = parameter_shardings(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert whole[name].shape == shardings[name].global_shape, name
            parameter.zero_()
            for piece in shardings[name].pieces(tuple(parameter.shape)):
                window = _window(piece.offset, piece.shape)
                parameter[piece.local].copy_(whole[name][window])


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as one process would hold it. Call it on all ranks: one all-gather of objects."""
    return _put_together(model, lambda parameter: parameter.detach())


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient as one process would hold it. Call it on all ranks: one all-gather of objects.

    Asserts that the gradients of padding rows are exactly zero and those of replicated parameters bit-equal.
    """
    return _put_together(model, _gradient)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _put_together(model: nn.Module, read: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    shardings = parameter_shardings(model)
    mine = {name: _pieces(read(parameter), shardings[name]) for name, parameter in model.named_parameters()}
    ranks = [mine]
    if dist.is_initialized():
        ranks = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
    return {name: _assemble(name, shardings[name], [rank[name] for rank in ranks]) for name in mine}


def _pieces(local: Tensor, sharding: Sharding) -> Pieces:
    """The parts of the global tensor that `local` holds; asserts that the rest of it (padding) is zero."""
    pieces = sharding.pieces(tuple(local.shape))
    rest = local.clone()
    for piece in pieces:
        rest[piece.local] = 0
    assert torch.count_nonzero(rest) == 0, f"{sharding.name}: the padding is not zero"
    return [(piece.offset, local[piece.local].clone()) for piece in pieces]


def _assemble(name: str, sharding: Sharding, ranks: list[Pieces]) -> Tensor:
    if sharding.split_dim is None:
        (_, first), *_ = ranks[0]
        for (_, other), *_ in ranks[1:]:
            assert torch.equal(first, other), f"{name}: replicas differ"
        return first
    pieces = [piece for rank in ranks for piece in rank]
    whole = torch.empty(sharding.global_shape, dtype=pieces[0][1].dtype)
    times = torch.zeros(sharding.global_shape, dtype=torch.int)
    for offset, tensor in pieces:
        window = _window(offset, tuple(tensor.shape))
        whole[window] = tensor
        times[window] += 1
    assert (times == 1).all(), f"{name}: not held exactly once"
    return whole


def _window(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
