"""Checkpoints of this library as a `Transfer`, read tensor by tensor, and a `Transfer` as one, written so."""

import dataclasses
import functools
import math
import reprlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.files import atomic_write, new_folder
from megatron.base.rectangles import Rectangle
from megatron.checkpointing.checksum import crc32
from megatron.checkpointing.convert.deferred import Deferred, Readable
from megatron.checkpointing.convert.kinds import transformer_config
from megatron.checkpointing.convert.models import ModelKind, outputs
from megatron.checkpointing.convert.transfer import Transfer
from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.folders import (
    INDEX,
    STATE,
    TRACKER,
    clean_leftovers,
    complete_iterations,
    iteration_folder,
    publish,
    saved_iterations,
    temporary_folder,
)
from megatron.checkpointing.index import (
    Contents,
    Index,
    StoredTensor,
    dtype_name,
    dtype_of,
    file_name,
    merged,
)
from megatron.checkpointing.load import load_checkpoint
from megatron.checkpointing.save import BLOCK_BYTES
from megatron.checkpointing.survey import Survey
from megatron.checkpointing.untrusted import shape_of
from megatron.checkpointing.values import to_json
from megatron.checkpointing.writer import NewPiece, write_pieces
from megatron.mpu.sharding import parameter_shardings
from megatron.optimizer.state import OPTIMIZER_STATE

# Tensors are written to one file until it has this many bytes.
FILE_BYTES = 256 * 2**20


def from_native(directory: Path, step: int | None = None, optimizer: bool = True) -> Transfer:
    """The model of the newest checkpoint below `directory`, or of that iteration; ValueError as where one is loaded."""
    survey = Survey.of(directory, step)
    for problem in survey.problems():
        raise DamageError(problem)
    model, sections, run, plain = (_part(survey, name) for name in ("model", "config", "run", "optimizer"))
    try:
        kind = ModelKind.of_signature(model)
    except ValueError as error:
        raise ValueError(f"{survey.folder / STATE}: {error}") from error
    if kind is None or not isinstance(sections.get("model"), dict) or not survey.tensors:
        words = reprlib.repr(model.get("model", "a model of another kind"))
        raise ValueError(f"{survey.folder}: it is of {words}; GPTs and BERTs are converted here")
    tensors: dict[str, Readable] = {
        name: Deferred(dtype_of(stored.dtype), stored.shape, functools.partial(survey.read, name))
        for name, stored in survey.tensors.items()
    }
    try:
        config = transformer_config(sections["model"], len(tensors))
        (vocab_size,) = shape_of([model.get("vocab_size")])
    except ValueError as error:
        raise ValueError(f"{survey.folder / STATE}: {error}") from error
    transfer = Transfer(
        config,
        vocab_size,
        tensors,
        kind,
        iteration=survey.index.iteration,
        progress=run,
        optimizer=plain,
        sections=sections,
        table=[f"{len(tensors):3d} tensors, as they are"],
    )
    has_state = len(transfer.weights) < len(tensors)
    return transfer if optimizer and has_state else transfer.without_optimizer()


def _part(survey: Survey, name: str) -> dict[str, Any]:
    """An entry of the plain values; empty where it is absent."""
    part = survey.state().get(name, {})
    if not isinstance(part, dict):
        raise ValueError(f"{survey.folder / STATE}: {name} is a {type(part).__name__}, and must be a JSON object")
    return part


def to_native(transfer: Transfer, directory: Path, origin: str) -> Path:
    """Write a checkpoint from which a run can start; returns its folder.

    It holds whole tensors, and no random states: its layout is none that a run can have. Only some tensors are in
    memory at a time. Raises ValueError where there are checkpoints in `directory` already.
    """
    refuse_checkpoints(directory)
    transfer.check()
    with new_folder(directory):
        clean_leftovers(directory)
        temporary = temporary_folder(directory, transfer.iteration)
        temporary.mkdir()
        try:
            _write(transfer, temporary, origin)
            publish(directory, transfer.iteration)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return iteration_folder(directory, transfer.iteration)


def refuse_checkpoints(directory: Path) -> None:
    """Raise ValueError where there are checkpoints in `directory`, be it that no tracker names one."""
    if (directory / TRACKER).exists() or saved_iterations(directory) or complete_iterations(directory):
        raise ValueError(f"--save {directory}: there are checkpoints in it already")


def _write(transfer: Transfer, folder: Path, origin: str) -> None:
    """The files of a checkpoint."""
    contents = merged(_write_file(folder / file_name(n), b) for n, b in enumerate(_batches(transfer.tensors)))
    contents.check_cover()
    state = to_json(_state(transfer)).encode()
    index = Index(transfer.iteration, {"converted from": origin}, BLOCK_BYTES, crc32(state), contents)
    for name, content in ((STATE, state), (INDEX, index.to_json().encode())):
        with atomic_write(folder / name, "wb") as stream:
            stream.write(content)


def _batches(tensors: Mapping[str, Readable]) -> Iterator[list[NewPiece]]:
    """The tensors, read, as many at a time as go into one file."""
    batch: list[NewPiece] = []
    size = 0
    for name, tensor in tensors.items():
        size += math.prod(tensor.shape) * tensor.dtype.itemsize
        batch.append(NewPiece(name, Rectangle.whole(tensor.shape), tensor.read()))
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
def native_logits(directory: Path, tokens: Tensor, step: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """What the model of a checkpoint gives for token ids [b, s], by our model on one rank in float32: `outputs`.

    `dtype` is the number format to which the weights are rounded before; they are as they lie there by default. The
    vocabulary is without padding, except for that which is trained.
    """
    transfer = from_native(directory, step, optimizer=False)
    model = transfer.model().to_empty(device="cpu")
    shardings = parameter_shardings(model)
    tensors = {name: (parameter.detach(), shardings[name]) for name, parameter in model.named_parameters()}
    load_checkpoint(directory, tensors, rank=0, layout={}, iteration=transfer.iteration, skip=(OPTIMIZER_STATE,))
    return outputs(model.to(dtype or transfer.dtype).float().eval(), tokens)
