"""A GPT out of a folder of Hugging Face's as it stands: what it is, and each rank's part of its weights."""

import os
from pathlib import Path

import torch

from megatron.base.complaints import naming
from megatron.checkpointing.convert import Told, Transfer, from_hugging_face
from megatron.checkpointing.folders import TRACKER
from megatron.checkpointing.placed import Placed, held_rectangles
from megatron.tokenizer import TokenizerConfig, build_tokenizer
from megatron.tokenizer.folders import find_tokenizer


def is_hugging_face(directory: str | os.PathLike[str]) -> bool:
    """Whether it is a folder of Hugging Face's and no run's."""
    there = Path(directory)
    return (there / "config.json").is_file() and not (there / TRACKER).exists()


def open_folder(directory: str | os.PathLike[str]) -> tuple[Transfer, TokenizerConfig]:
    """The model, of which nothing but headers is read yet, and its tokenizer, plain ids where it has none.

    Raises ValueError where it is not whole, or no GPT-2.
    """
    tokenizer = find_tokenizer(Path(directory))
    size = None if tokenizer is None else build_tokenizer(tokenizer).vocab_size
    with naming(directory):
        transfer = from_hugging_face(Path(directory), Told(tokenizer_size=size))
        if transfer.kind.name != "gpt":
            raise ValueError(f"it is of a {transfer.kind.name}, and a gpt is needed")
        transfer.check()
    return transfer, tokenizer or TokenizerConfig("NullTokenizer", vocab_size=transfer.vocab_size)


@torch.no_grad()
def fill(tensors: Placed, transfer: Transfer) -> None:
    """Put weights of `transfer` where this rank holds them, one whole tensor in memory at a time; padding is zero."""
    for name, (tensor, place) in tensors.items():
        whole = transfer.tensors[name].read()
        tensor.zero_()
        for rectangle, part in held_rectangles(tensor, place):
            part.copy_(whole[rectangle.slices((0,) * whole.dim())])
