"""Plain safetensors files, as Hugging Face keeps models: opened without reading the tensors, written one at a time."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.files import atomic_write
from megatron.checkpointing.convert.deferred import Readable
from megatron.checkpointing.header import Span, make_header, read_header
from megatron.checkpointing.index import dtype_name, dtype_of

_BLOCK = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A tensor in a safetensors file."""

    path: Path
    span: Span

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return dtype_of(self.span.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.span.shape

    def read(self) -> Tensor:
        """Its values."""
        content = bytearray(self.span.end - self.span.begin)
        if not content:
            return torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb") as stream:
            stream.seek(self.span.begin)
            if stream.readinto(content) < len(content):
                raise ValueError(f"{self.path}: it is cut")
        return torch.frombuffer(content, dtype=self.dtype).view(self.shape)


def read_safetensors(path: Path) -> dict[str, StoredArray]:
    """The tensors in a file by name. Raises ValueError naming the file where it is damaged or no such file."""
    with open(path, "rb") as stream:
        try:
            return {name: StoredArray(path, span) for name, span in read_header(stream).items()}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def write_safetensors(path: Path, tensors: Mapping[str, Readable]) -> None:
    """Write a file of these tensors; one of them at a time is read. It takes its name when it is complete."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with atomic_write(path, "wb") as stream:
        stream.write(make_header((name, dtype_name(tensor.dtype), tensor.shape) for name, tensor in ordered))
        for _, tensor in ordered:
            content = tensor.read().contiguous().flatten().view(torch.uint8)
            for begin in range(0, len(content), _BLOCK):
                stream.write(content[begin : begin + _BLOCK].numpy().data)
