"""Checkpoints of this library as a `Transfer`, read tensor by tensor, and a `Transfer` as one, written so."""

import dataclasses
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.compose import make_section
from megatron.base.files import atomic_write
from megatron.base.rectangles import Rectangle
from megatron.checkpointing.convert.deferred import Deferred, Readable
from megatron.checkpointing.convert.transfer import OPTIMIZER, Transfer
from megatron.checkpointing.folders import (
    INDEX,
    STATE,
    TRACKER,
    clean_leftovers,
    iteration_folder,
    publish,
    temporary_folder,
    tracked_iteration,
    whole_folder,
)
from megatron.checkpointing.index import Contents, Index, StoredTensor, dtype_name, dtype_of, file_name, merged
from megatron.checkpointing.load import load_checkpoint, read_state
from megatron.checkpointing.reader import PieceReader
from megatron.checkpointing.save import BLOCK_BYTES
from megatron.checkpointing.values import to_json
from megatron.checkpointing.writer import NewPiece, write_pieces
from megatron.model import TransformerConfig
from megatron.mpu.sharding import parameter_shardings

# Tensors are written to one file until it has this many bytes.
FILE_BYTES = 256 * 2**20


def from_native(directory: Path, step: int | None = None, optimizer: bool = True) -> Transfer:
    """The GPT of the newest checkpoint below `directory`, or of iteration `step`; ValueError as where one is loaded."""
    iteration = tracked_iteration(directory) if step is None else step
    if iteration is None:
        raise ValueError(f"{directory}: there is no checkpoint in it, for there is no {TRACKER}")
    state = read_state(directory, iteration)
    folder = whole_folder(directory, iteration)
    index = Index.from_json((folder / INDEX).read_bytes())
    index.contents.check_cover()
    model, sections = state.get("model", {}), state.get("config", {})
    if model.get("model") != "gpt" or "model" not in sections:
        raise ValueError(f"{folder}: it is of {model.get('model', 'a model of another kind')}; GPTs are converted here")
    tensors: dict[str, Readable] = {
        name: Deferred(dtype_of(stored.dtype), stored.shape, _reading(folder, index, stored))
        for name, stored in index.contents.tensors.items()
    }
    transfer = Transfer(
        make_section(TransformerConfig, sections["model"]),
        model["vocab_size"],
        tensors,
        iteration=iteration,
        progress=state.get("run", {}),
        optimizer=state.get("optimizer", {}),
        sections=sections,
        table=[f"{len(tensors):3d} tensors, as they are"],
    )
    has_state = len(transfer.weights) < len(tensors)
    return transfer if optimizer and has_state else transfer.without_optimizer()


def _reading(folder: Path, index: Index, stored: StoredTensor) -> Callable[[], Tensor]:
    def read() -> Tensor:
        values = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        whole = Rectangle((0,) * len(stored.shape), stored.shape)
        with PieceReader(folder, index.block_bytes) as reader:
            reader.read([(stored, [(whole, values)])])
        return values

    return read


def to_native(transfer: Transfer, directory: Path, origin: str) -> Path:
    """Write a checkpoint from which a run can start; returns its folder.

    It holds whole tensors, and no random states: its layout is none that a run can have. Only some tensors are in
    memory at a time. Raises ValueError where there are checkpoints in `directory` already.
    """
    if (directory / TRACKER).exists():
        raise ValueError(f"--save {directory}: there are checkpoints in it already")
    transfer.check()
    directory.mkdir(parents=True, exist_ok=True)
    clean_leftovers(directory)
    temporary = temporary_folder(directory, transfer.iteration)
    temporary.mkdir()
    try:
        contents = merged(_write_file(temporary / file_name(n), b) for n, b in enumerate(_batches(transfer.tensors)))
        contents.check_cover()
        state = to_json(_state(transfer)).encode()
        layout = {"converted from": origin}
        index = Index(transfer.iteration, layout, BLOCK_BYTES, zlib.crc32(state), contents)
        for name, content in ((STATE, state), (INDEX, index.to_json().encode())):
            with atomic_write(temporary / name, "wb") as stream:
                stream.write(content)
        publish(directory, transfer.iteration)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return iteration_folder(directory, transfer.iteration)


def _batches(tensors: Mapping[str, Readable]) -> Iterator[list[NewPiece]]:
    """The tensors, read, as many at a time as go into one file."""
    batch: list[NewPiece] = []
    size = 0
    for name, tensor in tensors.items():
        size += math.prod(tensor.shape) * tensor.dtype.itemsize
        batch.append(NewPiece(name, Rectangle((0,) * len(tensor.shape), tensor.shape), tensor.read()))
        if size >= FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_file(path: Path, batch: list[NewPiece]) -> Contents:
    """Write whole tensors to a file; returns what the index says of it."""
    stored = dict(write_pieces(path, batch, BLOCK_BYTES))
    tensors = {
        new.name: StoredTensor(new.name, dtype_name(new.values.dtype), new.rectangle.shape, (stored[new.name],))
        for new in batch
    }
    return Contents(tensors, {}, {path.name: path.stat().st_size})


def _state(transfer: Transfer) -> dict[str, Any]:
    """What a run keeps beside tensors, as `megatron.training.state` reads it."""
    nothing = {"iteration": transfer.iteration, "consumed_samples": 0, "scheduled_samples": 0, "skipped_iterations": 0}
    return {
        "run": {**nothing, **transfer.progress},
        "model": transfer.model().signature(),
        "optimizer": dict(transfer.optimizer or {"step_count": 0}),
        "config": {**transfer.sections, "model": dataclasses.asdict(transfer.config)},
        "versions": {},
    }


@torch.no_grad()
def native_logits(directory: Path, tokens: Tensor, step: int | None = None) -> Tensor:
    """What the GPT of a checkpoint gives for token ids [b, s], by our model on one rank in float32: [b, s, v].

    v is without padding, except for that which is trained.
    """
    transfer = from_native(directory, step, optimizer=False)
    model = transfer.model().to_empty(device="cpu")
    shardings = parameter_shardings(model)
    tensors = {name: (parameter.detach(), shardings[name]) for name, parameter in model.named_parameters()}
    load_checkpoint(directory, tensors, rank=0, layout={}, iteration=transfer.iteration, skip=(OPTIMIZER,))
    return model.float().eval()(tokens)[..., : transfer.config.vocabulary_rows(transfer.vocab_size)]
