"""The global norm of gradients: float64 sums of short blocks, each replicated parameter counted once."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.mpu.collectives import all_reduce
from megatron.mpu.sharding import Sharding

# A float32 norm of one long CPU buffer is off by 1.6e-3 at 30M elements; of a block this short, by some 1e-7.
BLOCK = 4096


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of squares of all elements, float64 and 0-D, on the device of the tensors (the CPU where there is none).

    Each tensor is cut into blocks of at most 4,096 elements; a block's norm is taken in the tensor's dtype, at least
    float32, squared in float64 and added in float64.
    """
    sums = [_squared_norm(tensor.detach()) for tensor in tensors if tensor.numel()]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def _squared_norm(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=dtype).double()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype).double()
    return blocks.square().sum() + rest.square()


def global_gradient_norm(
    gradients: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    group: ProcessGroup | None,
    tensor_rank: int,
) -> float:
    """The 2-norm of all gradients of a model that is split over tensor ranks; equal on all of them.

    Args:
        gradients: this rank's gradients by parameter name, already summed over data replicas.
        shardings: where each parameter belongs; what is not split is whole on every tensor rank and counted on the
            first only. Padding rows of a vocabulary have no gradient.
        group: the tensor group, None for this rank alone.
        tensor_rank: this rank's place in `group`.

    One all-reduce of one float64 over `group`.
    """
    counted = [g for name, g in gradients.items() if tensor_rank == 0 or shardings[name].split_dim is not None]
    device = next((g.device for g in gradients.values()), torch.device("cpu"))
    total = squared_norm(counted).to(device)
    if group is not None:
        all_reduce(total, group)
    return total.sqrt().item()
