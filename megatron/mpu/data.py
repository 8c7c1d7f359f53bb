"""Handing a batch from the first tensor rank, which read it, to the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.collectives import process_group
from megatron.mpu.initialize import GroupInfo, resolve_group

_MAX_DIMS = 7  # of a tensor that is handed over; the header has a fixed size


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, datatype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors `data[key]` of the tensor group's first rank, on every rank of it. Two broadcasts.

    Args:
        keys: the same on every rank.
        data: on the first rank, tensors of at most 7 dimensions; on the others it is not looked at and may be None.
        datatype: of all the tensors.

    Returns:
        New tensors on the device of the group's backend: the accelerator, or the CPU for gloo. They need no gradient.

    Raises:
        ValueError: on every rank, where a key is missing on the first, is no tensor, has another dtype or too many
            dimensions, or cannot be read.
        RuntimeError: the number of tensor ranks was set by hand, without processes.
    """
    if not keys:
        return {}
    info = resolve_group(None)
    device = _device(info)
    failure: Exception | None = None
    header = torch.zeros(1 + len(keys) * (1 + _MAX_DIMS), dtype=torch.int64)
    if info.rank == 0:
        try:
            header, flat = _packed(keys, data or {}, datatype, device)
        except Exception as error:  # whatever it is: the others wait, and are told before it is raised
            failure = error
            header[0] = 1
    header = _broadcast(header.to(device), info).cpu()
    if header[0]:
        raise ValueError(
            str(failure or "broadcast_data: the first rank of the tensor group refused its data")
        ) from failure
    shapes = [row[1 : 1 + row[0]] for row in header[1:].view(len(keys), 1 + _MAX_DIMS).tolist()]
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    if info.rank != 0:
        flat = torch.empty(sum(sizes), dtype=datatype, device=device)
    _broadcast(flat.view(torch.uint8), info)  # bytes: not every backend knows every dtype
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(sizes), shapes, strict=True)}


def _packed(
    keys: Sequence[str], data: Mapping[str, torch.Tensor], datatype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The header and all values one after another; `ValueError` naming each key that cannot be handed over."""
    problems = _problems(keys, data, datatype)
    if problems:
        raise ValueError("; ".join(problems))
    return _header(keys, data), torch.cat([data[key].detach().reshape(-1).to(device) for key in keys])


def _problems(keys: Sequence[str], data: Mapping[str, Any], datatype: torch.dtype) -> list[str]:
    found = []
    for key in keys:
        if key not in data:
            found.append(f"broadcast_data: key {key!r} is not in the data, which has {', '.join(data) or 'nothing'}")
        elif not isinstance(data[key], torch.Tensor):
            found.append(f"broadcast_data: {key!r} is a {type(data[key]).__name__}: all data must be tensors")
        elif data[key].dtype != datatype:
            found.append(f"broadcast_data: {key!r} is {data[key].dtype}: all data must be {datatype}")
        elif data[key].dim() > _MAX_DIMS:
            found.append(f"broadcast_data: {key!r} has {data[key].dim()} dimensions: at most {_MAX_DIMS} are accepted")
    return found


def _header(keys: Sequence[str], data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A zero, then a row for each key: the number of dimensions and their sizes."""
    rows = [[data[key].dim(), *data[key].shape, *[0] * (_MAX_DIMS - data[key].dim())] for key in keys]
    return torch.tensor([0, *(number for row in rows for number in row)], dtype=torch.int64)


def _device(info: GroupInfo) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or (info.size > 1 and dist.get_backend(process_group(info)) == "gloo"):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _broadcast(x: torch.Tensor, info: GroupInfo) -> torch.Tensor:
    if info.size > 1:
        dist.broadcast(x, group=process_group(info), group_src=0)
    return x
